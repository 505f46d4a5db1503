"""The race checker against brute force: reachability in the graph of everything issued."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from memo.errors import RaceError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import VirtualStreams
from memo.executor.streams import AccessMode, Event, Stream

COMPUTE, OFFLOAD, PREFETCH = Stream.COMPUTE, Stream.OFFLOAD, Stream.PREFETCH


@dataclass
class Graph:
    """Nodes are calls; an edge leads to what can only run later: same stream, record to wait, synchronize."""

    edges: list[set[int]] = field(default_factory=list)  # node -> its direct predecessors
    last: dict[Stream, int] = field(default_factory=dict)
    accesses: list[tuple[int, str, AccessMode]] = field(default_factory=list)

    def add(self, stream: Stream, *after: int) -> int:
        self.edges.append({*after, *([self.last[stream]] if stream in self.last else [])})
        self.last[stream] = len(self.edges) - 1
        return self.last[stream]

    def synchronize(self) -> None:
        everything = set(self.last.values())
        for stream in Stream:
            self.add(stream, *everything)

    def before(self, node: int) -> set[int]:
        found: set[int] = set()
        todo = [node]
        while todo:
            new = self.edges[todo.pop()] - found
            found |= new
            todo += new
        return found

    def races(self, stream: Stream, buffer: str, mode: AccessMode) -> bool:
        """Adds an access; whether an earlier conflicting one is not before it."""
        node = self.add(stream)
        before = self.before(node)
        conflict = any(
            name == buffer and "w" in (mode, other) and earlier not in before for earlier, name, other in self.accesses
        )
        self.accesses.append((node, buffer, mode))
        return conflict


def random_program(rng: random.Random, length: int) -> tuple[bool, int]:
    """Issues random calls to the checker and to the graph until the first race; both must see the same."""
    checker, graph = Checked(VirtualStreams()), Graph()
    events: list[tuple[Event, int]] = []
    for index in range(length):
        stream = rng.choice(list(Stream))
        call = rng.choices(["access", "record", "wait", "synchronize"], [4, 4, 6, 0.3])[0]
        if call == "access":
            buffer, mode = rng.choice(["a", "b", "c"]), rng.choice(["r", "r", "w"])
            expected, found = graph.races(stream, buffer, mode), False  # type: ignore[arg-type]
            try:
                checker.access(stream, buffer, mode, f"call {index}")  # type: ignore[arg-type]
            except RaceError:
                found = True
            assert found == expected, f"call {index}"
            if found:
                return True, index
        elif call == "record":
            events.append((checker.record(stream), graph.add(stream)))
        elif call == "wait" and events:
            event, node = rng.choice(events[-6:])
            checker.wait(stream, event)
            graph.add(stream, node)
        elif call == "synchronize":
            checker.synchronize()
            graph.synchronize()
    return False, length


def test_random_programs() -> None:
    outcomes = [random_program(random.Random(seed), 60) for seed in range(1500)]
    raced = sum(race for race, _ in outcomes)
    late = sum(race and index > 15 for race, index in outcomes)
    assert raced > 300 and late > 50 and raced < 1500  # the programs are neither trivial nor hopeless


def test_an_event_covers_only_what_came_before_it() -> None:
    checker = Checked(VirtualStreams())
    early = checker.record(COMPUTE)
    checker.access(COMPUTE, "slot0", "w", "F0 layer 0")
    checker.wait(OFFLOAD, early)
    with pytest.raises(RaceError) as raised:
        checker.copy(OFFLOAD, torch.zeros(1), torch.zeros(1), "record0", "slot0")
    assert str(raised.value) == (
        "race on slot0: 'copy slot0 -> record0' on offload reads it, while 'F0 layer 0' on compute writes it, and no"
        " event orders them: offload must wait for an event that compute records after its access"
    )


def test_a_copy_reads_its_source_and_writes_its_target() -> None:
    for name, mode, race in (("to", "r", True), ("to", "w", True), ("from", "r", False), ("from", "w", True)):
        checker = Checked(VirtualStreams())
        checker.copy(OFFLOAD, torch.zeros(1), torch.zeros(1), "to", "from")
        if race:
            with pytest.raises(RaceError, match=f"race on {name}"):
                checker.access(COMPUTE, name, mode, "layer")  # type: ignore[arg-type]
        else:
            checker.access(COMPUTE, name, mode, "layer")  # type: ignore[arg-type]

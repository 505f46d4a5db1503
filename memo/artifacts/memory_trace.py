"""The memory requests of one training iteration of one rank, in order, phase by phase.

As a file (schema "memory_trace"):

    {"schema": "memory_trace", "version": 1, "device": "cpu", "source": "recorded", "run": {"seq_length": ...},
     "phases": [{"kind": "layer_forward", "layer": 0, "microbatch": 0,
                 "events": [["malloc", 7, 4194304], ["free", 7]]}, ...]}

An id is unique in the trace. A request that is never freed outlives the iteration. Requests from before the iteration
do not occur.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple, NoReturn, Self

from memo.artifacts.artifact import Artifact, write
from memo.artifacts.fields import Written
from memo.artifacts.reading import Source, listed, shown
from memo.errors import TraceError

ATTENTION = "attention"
"""The kind of a phase whose requests depend on the boundaries of packed documents. In a trace that can be planned, it
requests one block with room for all these requests (memo.planner.attention_blocks)."""
MAX_BYTES = 1 << 48
"""256 TiB: larger requests are errors, and sums of thousands of smaller ones still fit in 64 bits."""


class Malloc(NamedTuple):
    id: int
    num_bytes: int


class Free(NamedTuple):
    id: int


Event = Malloc | Free


@dataclass(frozen=True)
class Phase:
    """A part of the iteration, such as the forward of one layer, with its requests.

    Attributes:
        kind: such as "embedding_forward", "layer_forward", "loss", "layer_backward", "optimizer"; phases of one
            kind with equal requests are planned once.
        layer, microbatch: -1 if the phase has none.
    """

    kind: str
    layer: int
    microbatch: int
    events: Annotated[tuple[Event, ...], Written(list[Any])]

    def __str__(self) -> str:
        where = [f"{name} {index}" for name, index in (("layer", self.layer), ("microbatch", self.microbatch))]
        return " ".join([self.kind, *(text for text in where if not text.endswith("-1"))])


@dataclass(frozen=True)
class Trace(Artifact):
    """One iteration of one rank.

    Attributes:
        device: the allocator's device, "cpu" or "cuda".
        source: "recorded" (every request of a real run), "composed" (one recorded layer represents all layers),
            "fitted" (from shorter sequences) or "fake" (from shapes alone, without scratch memory of kernels).
        run: model, layout and sequence length, for people.
    """

    schema = "memory_trace"
    remedy = "record the trace again"

    device: str
    source: str
    phases: tuple[Phase, ...]
    run: dict[str, Any] = field(default_factory=dict)

    def save(self, path: str | Path) -> None:
        def written(phase: Phase) -> dict[str, Any]:
            events = [["malloc", *event] if isinstance(event, Malloc) else ["free", *event] for event in phase.events]
            return {**vars(phase), "events": events}

        write(path, self.schema, self.version, {**vars(self), "phases": [written(phase) for phase in self.phases]})

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read a trace. Raises ArtifactError for a file without a trace, and the TraceErrors of `requests`."""
        found, source = super().load(path), Source(str(path), TraceError, cls.remedy)
        phases = [
            replace(phase, events=tuple(_events(phase.events, f"phases[{index}]", source)))
            for index, phase in enumerate(found.phases)
        ]
        trace = replace(found, phases=tuple(phases))
        check_trace(trace)
        return trace


class Request(NamedTuple):
    """One block of memory and its lifespan [lower, upper), in numbers of events."""

    id: int
    num_bytes: int
    lower: int
    upper: int
    phase: int
    """Index of the phase that requests it."""
    freed_in: int | None
    """Index of the phase that frees it; None if it outlives the iteration."""


def requests(trace: Trace) -> list[Request]:
    """All requests in the order in which they are made.

    Raises TraceError for an empty trace, sizes that are not positive or absurd, a free without its malloc, a double
    free, and an id used twice.
    """
    found: dict[int, Request] = {}
    end, at = sum(len(phase.events) for phase in trace.phases), 0
    for index, phase in enumerate(trace.phases):
        for event in phase.events:
            made = found.get(event.id)
            if isinstance(event, Malloc):
                if not 0 < event.num_bytes <= MAX_BYTES:
                    _fail(at, phase, f"request {event.id} has {event.num_bytes} bytes, not 1 to {MAX_BYTES}")
                if made is not None:
                    _fail(at, phase, f"request {event.id} is made a second time")
                found[event.id] = Request(event.id, event.num_bytes, at, end, index, None)
            elif made is None:
                _fail(at, phase, f"request {event.id} is freed before it is made")
            elif made.freed_in is not None:
                _fail(at, phase, f"request {event.id} is freed twice")
            else:
                found[event.id] = Request(event.id, made.num_bytes, made.lower, at, made.phase, index)
            at += 1
    if not found:
        raise TraceError("the trace has no request: record a training iteration")
    return list(found.values())


def check_trace(trace: Trace) -> None:
    """Raises the TraceErrors of `requests`."""
    requests(trace)


def _events(entries: Iterable[Any], where: str, source: Source) -> Iterator[Event]:
    """Read the events of a file; memo.artifacts.fields would be too slow for a million events."""
    for at, entry in enumerate(entries):
        match entry:
            case ["malloc", int(id), int(num_bytes)] if type(id) is int and type(num_bytes) is int:
                yield Malloc(id, num_bytes)
            case ["free", int(id)] if type(id) is int:
                yield Free(id)
            case _:
                written = f"[{listed(entry)}]" if isinstance(entry, list) else shown(entry)
                raise source.refusal(
                    f'{where}.events[{at}] is {written}, neither ["malloc", ID, BYTES] nor ["free", ID]'
                )


def _fail(at: int, phase: Phase, what: str) -> NoReturn:
    raise TraceError(f"event {at} ({phase}): {what}: record the trace again")

"""Race campaign of states that stream: every wait, and every copy, of several schedules is dropped once."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from state_runs import Seen, run
from swap_runs import DroppedWait, Forwarding, stage_ops
from torch import Tensor

from memo.errors import RaceError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import VirtualStreams
from memo.executor.streams import AccessMode, Stream, StreamBackend
from memo.mesh import Mesh, RankGrid
from memo.mesh.simulated import init_simulated
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import StatePlacement

ONE_MICROBATCH = stage_ops(1, 1, 1, 3, 0)
TWO_MICROBATCHES = stage_ops(1, 1, 2, 3, 0)
ALL, OPTIMIZER = StatePlacement(3, 3, 3, 3), StatePlacement(3, 3)
ZERO2 = {"shards_gradients": True}
ZERO3 = {**ZERO2, "shards_weights": True}
CASES: dict[str, tuple[int, list[LayerOp], StatePlacement, torch.dtype]] = {
    "optimizer, fp32": (1, stage_ops(1, 1, 1, 1, 0), StatePlacement(1, 1), torch.float32),
    "fractions, no weight copy": (
        1,
        stage_ops(1, 1, 1, 4, 0),
        StatePlacement(4, 3, 2, 1, weight_copy=False),
        torch.bfloat16,
    ),
    "one layer alone": (1, TWO_MICROBATCHES, StatePlacement(3, 1, 1, 1), torch.bfloat16),
    "pp 2 vpp 2": (1, stage_ops(2, 2, 2, 8, 1), StatePlacement(4, 4, 4, 4), torch.bfloat16),
    "dp 2, all, two microbatches": (2, TWO_MICROBATCHES, ALL, torch.bfloat16),
    "dp 2, ZeRO-2, optimizer, two microbatches": (2, TWO_MICROBATCHES, OPTIMIZER._replace(**ZERO2), torch.bfloat16),
    "dp 2, ZeRO-3, half": (2, ONE_MICROBATCH, StatePlacement(3, 2, 2, 2, **ZERO3), torch.bfloat16),
}


@dataclass
class DroppedCopy(Forwarding):
    """Skips the copy with this index, poison not counted; None skips none."""

    index: int | None
    copies: list[str] = field(default_factory=list)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        if src_name != "poison":
            self.copies.append(f"{src_name} -> {dst_name}")
            if len(self.copies) - 1 == self.index:
                return
        self.backend.copy(stream, dst, src, dst_name, src_name)


@dataclass
class Order(Forwarding):
    """Records, in order, the fetches and reads of the sum of gradients and the operations of layers."""

    events: list[str] = field(default_factory=list)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self.backend.copy(stream, dst, src, dst_name, src_name)
        if dst_name == "gradient sum 0" and src_name != "poison" and self.events[-1] != "fetch":
            self.events.append("fetch")

    def access(self, stream: Stream, name: str, mode: AccessMode, what: str) -> None:
        self.backend.access(stream, name, mode, what)
        if name == "gradient sum 0" and stream is Stream.COMPUTE:
            self.events += ["read"] if self.events[-1] != "read" else []
        elif what.startswith(("F", "B")) and self.events[-1:] != [what]:
            self.events.append(what)


@dataclass
class Verdicts:
    """Of a campaign on one rank.

    Attributes:
        caught: waits whose loss the checker reports.
        is_visible: whether one of these spoils data when copies run late.
        unseen: waits whose loss is not reported, but spoils data; must be none.
        unnoticed: copies whose loss changed nothing.
    """

    waits: int
    caught: list[int]
    is_visible: bool
    unseen: list[int]
    copies: int
    unnoticed: list[str]


class Campaign:
    """Of one schedule and placement, on one rank whose dp group is simulated: it sends to nobody, but data moves."""

    def __init__(self, world_size: int, ops: list[LayerOp], placement: StatePlacement, dtype: torch.dtype) -> None:
        grid = RankGrid(tp=1, cp=1, dp=world_size, pp=1)
        self.what: Any = (Mesh(grid, world_size - 1, is_simulated=True), dtype)
        self.ops, self.placement = ops, placement
        # Where other ranks are only simulated, the resident run knows more of their weights than they ever send.
        self.right = run(ops, placement, VirtualStreams() if world_size > 1 else None, *self.what)

    def run(self, backend: StreamBackend) -> Seen:
        return run(self.ops, self.placement, backend, *self.what)

    def is_wrong(self, backend: StreamBackend) -> bool:
        return self.run(backend).differs_from(self.right)

    def races(self, streams: StreamBackend, dropped: int) -> bool | None:
        """Whether the checker objects; None if it does not although the data is wrong."""
        try:
            wrong = self.is_wrong(DroppedWait(Checked(streams), dropped))
        except RaceError:
            return True
        return None if wrong else False

    def go(self) -> Verdicts:
        complete = DroppedWait(Checked(VirtualStreams("lazy")), None)
        assert not self.is_wrong(complete)
        found = Verdicts(complete.num_waits, [], False, [], 0, [])
        for dropped in range(found.waits):
            verdict = self.races(VirtualStreams("lazy"), dropped)
            if verdict is None:
                found.unseen.append(dropped)
            elif verdict:
                found.caught.append(dropped)
        # Unchecked, the data goes wrong only in some orders: why the checker is needed.
        found.is_visible = any(self.is_wrong(DroppedWait(VirtualStreams("lazy"), wait)) for wait in found.caught)
        whole = DroppedCopy(VirtualStreams(), None)
        self.run(whole)
        found.copies = len(whole.copies)
        for index, name in enumerate(whole.copies):
            if not self.is_wrong(DroppedCopy(VirtualStreams(), index)):
                found.unnoticed.append(name)
        return found


@pytest.fixture
def simulated_group(request: pytest.FixtureRequest) -> Iterator[None]:
    world_size = CASES[request.getfixturevalue("name")][0]
    if world_size > 1:
        init_simulated(world_size - 1, world_size)
    yield
    if world_size > 1:
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_thread", "simulated_group")
@pytest.mark.parametrize("name", CASES)
def test_every_dropped_wait_is_caught_or_redundant_and_every_dropped_copy_shows(name: str) -> None:
    found = Campaign(*CASES[name]).go()
    caught = len(found.caught)
    print(
        f"\n{name}: {found.waits} waits, {caught} drops caught, {found.waits - caught} redundant; {found.copies} copies"
    )
    assert found.unseen == []
    assert found.is_visible
    # An evaluation fetches the first layer for one more that does not come: here twice, and of two buckets.
    assert all(name.startswith("host weights of 0.layers.0.") for name in found.unnoticed)
    assert len(found.unnoticed) <= 2 * 2 < found.copies


@pytest.mark.usefixtures("one_thread", "simulated_group")
@pytest.mark.parametrize("name", ["dp 2, ZeRO-2, optimizer, two microbatches"])
def test_the_sum_of_earlier_microbatches_arrives_while_the_next_layer_runs(name: str) -> None:
    order = Order(VirtualStreams())
    Campaign(*CASES[name]).run(order)
    backward = ["B1 layer 2", "fetch", "B1 layer 1", "read", "fetch", "B1 layer 0", "read", "fetch", "read"]
    assert order.events[-len(backward) :] == backward

"""Runs of the swap engine with synthetic layers, and faults to inject into them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from memo.errors import RaceError
from memo.executor.checker import Checked
from memo.executor.cpu_streams import VirtualStreams
from memo.executor.delegating import DelegatingBackend
from memo.executor.disk_budget import DiskBudget
from memo.executor.host_budget import HostBudget
from memo.executor.host_records import HostRecords
from memo.executor.streams import Event, Stream, StreamBackend
from memo.executor.swapper import Swapper
from memo.planner.disk_plan import disk_plan
from memo.planner.swap import SwapPlan, SwapStep, swap_plan
from memo.spec.layer_ops import LayerOp, layer_ops
from memo.spec.schedule import Pipeline, breadth_first, one_f_one_b

SLOT_BYTES = 64
MOVED_BYTES = 40
NAN_BYTE = 0xFF
"""All bytes of a NaN in every floating dtype."""
CPU = torch.device("cpu")


def stage_ops(stages: int, chunks: int, microbatches: int, num_layers: int, stage: int) -> list[LayerOp]:
    """The layer operations of one stage under (interleaved) 1F1B."""
    pipeline = Pipeline(stages, chunks, microbatches)
    return layer_ops(pipeline, stage, num_layers, one_f_one_b(pipeline, stage))


def breadth_first_ops(microbatches: int, num_layers: int) -> list[LayerOp]:
    """The layer operations of one stage when all microbatches pass one layer before the next."""
    pipeline = Pipeline(1, num_layers, microbatches, breadth_first=True)
    return layer_ops(pipeline, 0, num_layers, breadth_first(pipeline))


def peak_records(plan: SwapPlan) -> int:
    """Return the most records in use at once: each from the issue of an offload to the issue of its prefetch."""
    used = peak = 0
    for step in plan.steps:
        used += step.offload
        peak = max(peak, used)
        used -= step.next_prefetch is not None
    return peak


SCHEDULES: dict[str, list[LayerOp]] = {
    "1 stage, 6 layers, 1 microbatch": stage_ops(1, 1, 1, 6, 0),
    "1 stage, 5 layers, 2 microbatches": stage_ops(1, 1, 2, 5, 0),
    "pp 2 stage 0, 8 layers, 4 microbatches": stage_ops(2, 1, 4, 8, 0),
    "pp 3 stage 1, 9 layers, 5 microbatches": stage_ops(3, 1, 5, 9, 1),
    "pp 4 stage 0, 12 layers, 6 microbatches": stage_ops(4, 1, 6, 12, 0),
    "pp 4 stage 0, 4 layers, 6 microbatches": stage_ops(4, 1, 6, 4, 0),
    "pp 2 vpp 2 stage 0, 8 layers, 4 microbatches": stage_ops(2, 2, 4, 8, 0),
}

OWN_PLAN = SwapPlan(
    steps=(
        SwapStep(LayerOp("F", 0, 1), slot=1),
        SwapStep(LayerOp("F", 0, 0), slot=0, offload=True, record=0),
        SwapStep(LayerOp("B", 0, 1), slot=1, next_prefetch=3),
        SwapStep(LayerOp("B", 0, 0), slot=1, prefetch=True, record=0),
    ),
    num_slots=2,
    num_records=1,
)
"""A plan with a prefetch directly after its own offload: valid, but memo does not make such plans."""


class Layers:
    """Synthetic layers: a forward fills its slot with a pattern of (microbatch, layer), a backward checks it."""

    def __init__(self, swapper: Swapper) -> None:
        self.swapper = swapper
        self.wrong: list[LayerOp] = []

    def step(self, stop_after: int | None = None) -> None:
        """Run the operations of one training step in the plan's order; `stop_after` cuts the step short."""
        for step in self.swapper.plan.steps[:stop_after]:
            op = step.op
            slot = self.swapper.slots[self.swapper.begin(op.kind, op.layer)].view(torch.int64)
            pattern = 1000 * op.microbatch + op.layer
            if op.kind == "F":
                slot.fill_(pattern)
            else:
                valid = slot[: MOVED_BYTES // 8] if step.prefetch else slot
                if not bool((valid == pattern).all()):
                    self.wrong.append(op)
                slot.fill_(-1)  # a backward writes into its slot, because it recomputes activations that did not move
            self.swapper.end(op.kind, op.layer)


def make_swapper(plan: SwapPlan, backend: StreamBackend, poison: bool = False, device: torch.device = CPU) -> Swapper:
    """Return a swapper; `poison`: fill invalid memory with NaN."""
    backend = Poisoned(backend) if poison else backend
    slots = [torch.zeros(SLOT_BYTES, dtype=torch.uint8, device=device) for _ in range(plan.num_slots)]
    return Swapper(plan, slots, MOVED_BYTES, HostRecords(plan, MOVED_BYTES, device, backend), backend)


def on_disk(
    plan: SwapPlan,
    backend: StreamBackend,
    directory: Path,
    count: int,
    num_buffers: int,
    poison: bool = True,
    device: torch.device = CPU,
) -> Swapper:
    """Return a swapper with a number of records on a real disk, and all others in memory."""
    backend = Poisoned(backend) if poison else backend
    host = HostBudget(2**30, "a test", disk=DiskBudget(str(directory), 2**30))
    records = HostRecords(plan, MOVED_BYTES, device, backend, host, disk_plan(plan, count, num_buffers))
    slots = [torch.zeros(SLOT_BYTES, dtype=torch.uint8, device=device) for _ in range(plan.num_slots)]
    return Swapper(plan, slots, MOVED_BYTES, records, backend)


def run_steps(
    ops: Sequence[LayerOp], backend: StreamBackend, poison: bool = False, num_steps: int = 1
) -> list[LayerOp]:
    """Training steps with the plan of `ops`; returns the backwards that found wrong activations."""
    layers = Layers(make_swapper(swap_plan(ops), backend, poison))
    for _ in range(num_steps):
        layers.step()
        layers.swapper.next_step()
    backend.synchronize()
    return layers.wrong


def reuse_record(plan: SwapPlan) -> SwapPlan:
    """Move the content of record 1 to record 0, whose own content has not come back."""
    steps = tuple(
        SwapStep(s.op, s.slot, s.offload, s.prefetch, 0 if s.record == 1 else s.record, s.next_prefetch)
        for s in plan.steps
    )
    return SwapPlan(steps, plan.num_slots, plan.num_records)


@dataclass
class Forwarding(DelegatingBackend):
    """A backend that hands everything to another one; faults override one call."""

    backend: StreamBackend


class Poisoned(DelegatingBackend):
    """Fills memory that is declared invalid with NaN, on the stream from whose current point on it is invalid."""

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        content = buffer.view(torch.uint8)
        if stream is Stream.COMPUTE:
            content.fill_(NAN_BYTE)
        else:
            self.backend.copy(stream, content, torch.full_like(content, NAN_BYTE), name, "poison")


@dataclass
class DroppedWait(Forwarding):
    """Skips the wait with this index among the waits for an event; None skips none."""

    index: int | None
    num_waits: int = 0

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is None:
            return
        self.num_waits += 1
        if self.num_waits - 1 != self.index:
            self.backend.wait(stream, event)


def caught_drops(
    run: Callable[[StreamBackend], Sequence[object]],
    orders: Sequence[StreamBackend] = (),
    drop: Callable[[StreamBackend, int | None], DroppedWait] = DroppedWait,
) -> tuple[int, list[int]]:
    """Loses each wait of a run once: how many there are, and the losses that the checker tells.

    `run` returns what read wrong data: nothing, as long as the checker is silent. Other `orders` of the copies must not
    bring to light what it let pass.
    """
    complete = drop(Checked(VirtualStreams()), None)
    assert not run(complete)

    def is_told(dropped: int, order: StreamBackend) -> bool:
        try:
            wrong = run(drop(Checked(order), dropped))
        except RaceError:
            return True
        assert not wrong, f"wait {dropped}: no race reported, but {wrong[0]} read wrong data"
        return False

    caught = [wait for wait in range(complete.num_waits) if is_told(wait, VirtualStreams())]
    left = set(range(complete.num_waits)) - set(caught)
    assert not any(is_told(wait, order) for wait in left for order in orders)
    assert len(caught) >= complete.num_waits // 2
    return complete.num_waits, caught


@dataclass
class DroppedCopy(Forwarding):
    """Skips the first copy on a stream."""

    stream: Stream
    dropped: bool = False

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        if stream is self.stream and not self.dropped:
            self.dropped = True
            return
        self.backend.copy(stream, dst, src, dst_name, src_name)


@dataclass
class Logged(Forwarding):
    """Keeps a line for each call of an engine."""

    calls: list[str] = field(default_factory=list)
    on_copy: Callable[[], None] | None = None

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self.calls.append(f"{stream.value}: {src_name} -> {dst_name}")
        if self.on_copy is not None:
            self.on_copy()
        self.backend.copy(stream, dst, src, dst_name, src_name)

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        self.calls.append(f"{stream.value}: {reads} -> {writes}")
        self.backend.call(stream, task, reads, writes)

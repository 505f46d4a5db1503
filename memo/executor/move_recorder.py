"""Records everything that layers move while they are swept: keys and values, layer inputs and hidden states as well.

    with record_moves(trainer.parts.swap) as moves:
        ...  # one training step
    spans = moves.spans()

Each swapper gets a backend of its own that passes all calls on and takes timestamps around copies, transfers of the
disk, and waits of compute. A swapper copies in the order of its plan, slot by slot, so which step a copy belongs to
follows from its slot; and the disk reads in the order of the disk plan.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import cycle

from torch import Tensor

from memo.executor.passing import PassingBackend
from memo.executor.recorder import Recorder
from memo.executor.runtime import SwapRuntime, SweepRuntime
from memo.executor.streams import Event, Stream, StreamBackend, Timestamp
from memo.executor.swapper import Swapper
from memo.planner.disk_plan import DiskPlan
from memo.planner.swap import SwapPlan, SwapStep
from memo.report.timeline import Kind, Row, SwapSpan


@dataclass(frozen=True)
class _Seen:
    row: Row
    kind: Kind
    step: SwapStep
    begin: Timestamp
    end: Timestamp
    num_bytes: int


class MoveRecorder:
    """The copies of all swappers, in the order of issue."""

    def __init__(self, backend: StreamBackend, origin: Timestamp | None) -> None:
        self.backend = backend
        self.origin = origin or backend.timestamp(Stream.COMPUTE)
        self.seen: list[_Seen] = []
        self.layers: Recorder | None = None

    def spans(self) -> list[SwapSpan]:
        """All spans by the time at which they began; waits for all of them."""
        self.backend.synchronize()
        layers = [] if self.layers is None else self.layers.spans()
        beside = [
            SwapSpan(
                seen.row,
                seen.step,
                seen.begin.seconds_since(self.origin),
                seen.end.seconds_since(self.origin),
                seen.num_bytes,
                seen.kind,
            )
            for seen in self.seen
        ]
        return sorted([*layers, *beside], key=lambda span: span.start_s)


class _Passing(PassingBackend):
    """The backend of one swapper; `part`: which section all that it moves belongs to, where it is of one."""

    def __init__(
        self, log: MoveRecorder, swapper: Swapper, kind: Kind, reads: Iterator[SwapStep] | None, part: int | None
    ) -> None:
        super().__init__(swapper.backend)
        self._swapper, self._log, self._kind, self._reads, self._part = swapper, log, kind, reads, part
        self._names = {f"{swapper.name}slot{slot}": slot for slot in range(swapper.plan.num_slots)}
        self._offloads = _by_slot(swapper.plan, lambda step: step.offload)
        self._prefetches = _by_slot(swapper.plan, lambda step: step.prefetch)
        self._written: SwapStep | None = None  # the step whose offload was issued last

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        slot = self._names.get(src_name if stream is Stream.OFFLOAD else dst_name)
        if slot is None or stream not in (Stream.OFFLOAD, Stream.PREFETCH):  # NaN that tests write
            self.backend.copy(stream, dst, src, dst_name, src_name)
            return
        offloads = stream is Stream.OFFLOAD
        step = next((self._offloads if offloads else self._prefetches)[slot])
        self._written = step if offloads else self._written
        if self._kind == "activations":  # which the recorder of layers has
            self.backend.copy(stream, dst, src, dst_name, src_name)
            return
        with self._timed(stream, "offload" if offloads else "prefetch", step, dst.nbytes):
            self.backend.copy(stream, dst, src, dst_name, src_name)

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        step = self._written if stream is Stream.WRITE or self._reads is None else next(self._reads)
        assert step is not None, "a record is written to disk when it has been offloaded"
        with self._timed(stream, "write" if stream is Stream.WRITE else "read", step, 0):
            self.backend.call(stream, task, reads, writes)

    def wait(self, stream: Stream, event: Event | None) -> None:
        if stream is not Stream.COMPUTE or event is None or self._kind == "activations":
            self.backend.wait(stream, event)
            return
        with self._timed(stream, "wait", self._swapper.current, 0):
            self.backend.wait(stream, event)

    @contextmanager
    def _timed(self, stream: Stream, row: Row, step: SwapStep, num_bytes: int) -> Iterator[None]:
        begin = self.backend.timestamp(stream)
        yield
        if self._part is not None and step.op.section is None:
            step = replace(step, op=replace(step.op, section=self._part))
        self._log.seen.append(_Seen(row, self._kind, step, begin, self.backend.timestamp(stream), num_bytes))


def _by_slot(plan: SwapPlan, moves: Callable[[SwapStep], bool]) -> dict[int, Iterator[SwapStep]]:
    """Of each slot the steps that copy it, training step after training step."""
    return {
        slot: cycle([step for step in plan.steps if step.slot == slot and moves(step)])
        for slot in range(plan.num_slots)
    }


def _reads(plan: SwapPlan, disk: DiskPlan) -> Iterator[SwapStep]:
    """Steps whose records are read from the disk, in the order of the reads."""
    of_turn = {number: (step, part) for (step, part), number in disk.turn_of.items()}
    found = []
    for number, turn in enumerate(disk.turns):
        if turn.is_read:
            index, part = of_turn[number]
            step = plan.steps[index]
            found.append(step if disk.parts == 1 else replace(step, op=replace(step.op, section=part)))
    return cycle(found)


@contextmanager
def record_moves(runtime: SwapRuntime, origin: Timestamp | None = None) -> Iterator[MoveRecorder]:
    """Record the training steps of a runtime until the end of the block, which must begin between two steps.

    Times count from `origin`; default: the beginning of the block. Keeps a few numbers for each copy of each section,
    so record only single steps.
    """
    log = MoveRecorder(runtime.swapper.backend, origin)
    with contextlib.ExitStack() as stack:
        for swappers, kind in _swappers(runtime):
            staging = swappers[0].staging
            reads = None if staging is None else _reads(swappers[0].plan, staging.plan)
            for part, swapper in enumerate(swappers):
                own_part = part if kind == "keys and values" else None
                stack.enter_context(_replaced(swapper, _Passing(log, swapper, kind, reads, own_part)))
        log.layers = Recorder(runtime.swapper.backend, runtime.swapper.plan, log.origin)
        stack.enter_context(_replaced(runtime.swapper, log.layers))
        yield log


def _swappers(runtime: SwapRuntime) -> Iterator[tuple[list[Swapper], Kind]]:
    """By what they move; those of one kind share a disk plan."""
    yield [runtime.swapper], "activations"
    if isinstance(runtime, SweepRuntime):
        yield runtime.key_swapper.swappers, "keys and values"
        if runtime.inputs is not None:
            yield [runtime.inputs.swapper], "layer inputs"
        if runtime.hidden is not None:
            yield [runtime.hidden.stream.swapper], "hidden states"


@contextmanager
def _replaced(swapper: Swapper, backend: StreamBackend) -> Iterator[None]:
    before = swapper.backend
    swapper.backend = backend
    try:
        yield
    finally:
        swapper.backend = before

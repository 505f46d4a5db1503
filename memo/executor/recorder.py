"""Records when the streams of a real run worked: a backend that takes timestamps, and the spans it found.

    with record(swapper) as recorder:
        ...  # training steps
    spans = recorder.spans()

The recorder passes every call to another backend, in the same order and with the same events, and takes timestamps
around compute, copies and waits. The swapper declares an access when a layer operation begins and when it ends, and
issues its copies right after it, so the recorder needs no other information.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from memo.executor.passing import PassingBackend
from memo.executor.streams import AccessMode, Event, Stream, StreamBackend, Timestamp
from memo.executor.swapper import Swapper
from memo.planner.swap import SwapPlan, SwapStep
from memo.report.timeline import Row, SwapSpan


@dataclass(frozen=True)
class _Seen:
    row: Row
    step: SwapStep
    begin: Timestamp
    end: Timestamp
    num_bytes: int = 0


class Recorder(PassingBackend):
    """A backend that passes all calls to another one; see `record`."""

    def __init__(self, backend: StreamBackend, plan: SwapPlan, origin: Timestamp | None = None) -> None:
        super().__init__(backend)
        self.plan = plan
        self._steps = {str(step.op): step for step in plan.steps}
        self._seen: list[_Seen] = []
        self._origin = origin or backend.timestamp(Stream.COMPUTE)
        self._open: tuple[SwapStep, Timestamp] | None = None  # the layer operation that runs, and its begin
        self._waited: tuple[Timestamp, Timestamp] | None = None  # the wait of compute for the next operation
        # The step whose activations the next copy of a slot moves; one that waits for the disk is issued later.
        self._due: dict[tuple[Stream, str], SwapStep] = {}

    def spans(self) -> list[SwapSpan]:
        """All spans in the order of issue, in seconds since the recording began; waits for all copies."""
        self.backend.synchronize()
        return self.finished()

    def finished(self) -> list[SwapSpan]:
        """As `spans`, but only spans that have ended; does not wait.

        Once the host has read a number that compute produced after a training step, all spans of the step have ended: a
        swap plan fetches within the step whatever it offloads, and compute waits for these copies.
        """
        since = self._origin
        return [
            SwapSpan(
                seen.row, seen.step, seen.begin.seconds_since(since), seen.end.seconds_since(since), seen.num_bytes
            )
            for seen in self._seen
            if seen.end.is_reached()
        ]

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        step = self._due.pop((stream, src_name if stream is Stream.OFFLOAD else dst_name), None)
        if step is None:  # not a copy of the plan, but NaN that tests write
            self.backend.copy(stream, dst, src, dst_name, src_name)
            return
        begin = self.backend.timestamp(stream)
        self.backend.copy(stream, dst, src, dst_name, src_name)
        row: Row = "offload" if stream is Stream.OFFLOAD else "prefetch"
        self._seen.append(_Seen(row, step, begin, self.backend.timestamp(stream), dst.nbytes))

    def wait(self, stream: Stream, event: Event | None) -> None:
        if stream is not Stream.COMPUTE or event is None:
            self.backend.wait(stream, event)
            return
        begin = self.backend.timestamp(stream)
        self.backend.wait(stream, event)
        self._waited = begin, self.backend.timestamp(stream)

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self.backend.access(stream, buffer_name, mode, what)
        step = self._steps[what]
        if self._open is None:
            if self._waited is not None:
                self._seen.append(_Seen("wait", step, *self._waited))
                self._waited = None
            self._open = step, self.backend.timestamp(stream)
        else:
            begun, begin = self._open
            self._seen.append(_Seen("compute", begun, begin, self.backend.timestamp(stream)))
            self._open = None
            self._due |= self._moves_after(step, buffer_name)

    def synchronize(self) -> None:
        # The swapper synchronizes after an interrupted training step, whose open operation will never end.
        self._open = self._waited = None
        self._due = {}
        self.backend.synchronize()

    def _moves_after(self, step: SwapStep, slot_name: str) -> dict[tuple[Stream, str], SwapStep]:
        """Both are of the same slot."""
        moves = {(Stream.OFFLOAD, slot_name): step} if step.offload else {}
        if step.next_prefetch is not None:
            moves[Stream.PREFETCH, slot_name] = self.plan.steps[step.next_prefetch]
        return moves


@contextmanager
def record(swapper: Swapper, origin: Timestamp | None = None) -> Iterator[Recorder]:
    """Record the training steps of a swapper until the end of the block, which must begin between two steps.

    The times of spans count from `origin`, a timestamp of the swapper's backend; default: the beginning of the block.

    A recording keeps a few numbers for each layer operation, so record only single steps of a long run. On CUDA the
    timestamps are events, and only `Recorder.spans` waits for them.
    """
    backend = swapper.backend
    recorder = Recorder(backend, swapper.plan, origin)
    swapper.backend = recorder
    try:
        yield recorder
    finally:
        swapper.backend = backend

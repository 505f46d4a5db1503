"""Records when the streams of a real run worked, from the reports of swappers.

    with swapper.recorded() as recorder:  # trainer.parts.swap.recorded(): all that moves, and transfers of a disk
        ...  # training steps
    spans = recorder.spans()

A swapper reports its layer operations, its copies and the waits of compute; memo.executor.staging reports disk
transfers. Each report names the step of the plan. The recorder takes a timestamp of the stream at the beginning and the
end of each, and changes no order and no event.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from memo.executor.streams import Stream, StreamBackend, Timestamp
from memo.planner.swap import SwapStep
from memo.report.timeline import Kind, Row, SwapSpan

BeginSpan = Callable[[Row, SwapStep, int | None, int], Callable[[], None]]
"""Called when a span begins, with its row, its step, the part of the step's record (None: records are not divided) and
the bytes of a copy; returns a function to call at the end of the span."""

_STREAM_OF: dict[Row, Stream] = {
    "compute": Stream.COMPUTE,
    "wait": Stream.COMPUTE,
    "offload": Stream.OFFLOAD,
    "prefetch": Stream.PREFETCH,
    "write": Stream.WRITE,
    "read": Stream.READ,
}


@dataclass
class _OpenSpan:
    """A span that has begun; `end` stays None if an exception interrupts it."""

    row: Row
    kind: Kind
    step: SwapStep
    num_bytes: int
    begin: Timestamp
    end: Timestamp | None = None


class SwapRecorder:
    """The spans of one or several swappers.

    It keeps a few numbers for each operation and copy, so record only single steps of a long run. On CUDA the
    timestamps are events, and only `spans` waits for them.
    """

    def __init__(self, backend: StreamBackend, origin: Timestamp | None = None) -> None:
        """Times count from `origin`, a timestamp of the backend; default: now."""
        self._backend = backend
        self._origin = origin or backend.timestamp(Stream.COMPUTE)
        self._seen: list[_OpenSpan] = []

    def begin(self, kind: Kind, row: Row, step: SwapStep, part: int | None, num_bytes: int) -> Callable[[], None]:
        """A BeginSpan, once `kind` is bound. Only the swapper of activations reports the compute of layers."""
        if row == "compute" and kind != "activations":
            return lambda: None
        if part is not None and step.op.section is None:
            step = replace(step, op=replace(step.op, section=part))
        seen = _OpenSpan(row, kind, step, num_bytes, self._backend.timestamp(_STREAM_OF[row]))
        self._seen.append(seen)

        def end() -> None:
            seen.end = self._backend.timestamp(_STREAM_OF[row])

        return end

    def spans(self) -> list[SwapSpan]:
        """All spans by the time at which they began, in seconds; waits for all of them."""
        self._backend.synchronize()
        return self.finished()

    def finished(self) -> list[SwapSpan]:
        """The spans that have ended, in the order of `spans`; does not wait.

        Once the host has read a number that compute produced after a training step, all spans of the step have ended: a
        swap plan fetches everything that it offloads within the step, and compute waits for these copies.
        """
        found = [
            SwapSpan(
                seen.row,
                seen.step,
                seen.begin.seconds_since(self._origin),
                seen.end.seconds_since(self._origin),
                seen.num_bytes,
                seen.kind,
            )
            for seen in self._seen
            if seen.end is not None and seen.end.is_reached()
        ]
        return sorted(found, key=lambda span: span.start_s)


@contextlib.contextmanager
def timed(
    listeners: Sequence[BeginSpan], row: Row, step: SwapStep, part: int | None = None, num_bytes: int = 0
) -> Iterator[None]:
    """A context around one copy, transfer or wait, which is reported to the listeners."""
    ends = [begin(row, step, part, num_bytes) for begin in listeners]
    yield
    for end in ends:
        end()

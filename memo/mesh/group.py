"""Process groups that know the axis of the mesh they belong to, and a hook that observes a rank's work.

    mesh.watch.listener = recorder      # the recorder is notified of every message and every piece of work
    mesh.watch.listener = None          # the default: only the last message is noted

Functions that issue messages get the group as an argument, so the observer is an attribute of the group. There is no
global registry, and two trainers in one process do not observe each other.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Protocol

from torch import Tensor
from torch.distributed import ProcessGroup, Work

from memo.units import format_bytes


class OpenSpan(Protocol):
    """A message or piece of work that has begun."""

    def waits(self) -> None:
        """The rank now blocks until the end of this span."""

    def end(self) -> None:
        """The span has ended; if called several times, the last call counts."""


class Listener(Protocol):
    """An observer; called by the thread that does the work, which on CUDA may be autograd's."""

    def begin(self, row: str, name: str, num_bytes: int) -> OpenSpan:
        """`row` is "compute" or an axis of the mesh; `num_bytes` is a message's, the larger of its input and output."""


class Watch:
    """Observes the work of one rank. There is no listener unless a step is traced.

    Attributes:
        settle: called with each tensor of a point-to-point message when the current stream waits for its end.
        microbatch: the microbatch whose forward or backward runs.
        last, last_s: axis, name and bytes of the message that was issued last, and when (time.monotonic).
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.settle: Callable[[Tensor], None] | None = None
        self.microbatch = -1
        self.last: tuple[str, str, int] | None = None
        self.last_s = 0.0

    def last_message(self) -> str:
        """The last message as text."""
        if self.last is None:
            return "none yet over an axis of the mesh"
        axis, name, num_bytes = self.last
        return f"{name} over {axis} of {format_bytes(num_bytes)}, {time.monotonic() - self.last_s:.0f} s ago"

    def work(self, name: str) -> contextlib.AbstractContextManager[None]:
        """A context around a piece of the rank's own work."""
        return contextlib.nullcontext() if self.listener is None else _span(self.listener, name)


@contextlib.contextmanager
def _span(listener: Listener, name: str) -> Iterator[None]:
    span = listener.begin("compute", name, 0)
    try:
        yield
    finally:
        span.end()


class AxisGroup(ProcessGroup):
    """A process group with the name of its axis and the observer of its mesh.

    It is a ProcessGroup, so that it can be passed wherever one is expected, but it cannot communicate itself:
    memo.parallel.collectives passes `inner` to torch. torch refuses the wrapper with "not initialized".
    """

    def __init__(self, inner: ProcessGroup, axis: str, watch: Watch) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub knows one signature of two
        self.inner, self.axis, self.watch = inner, axis, watch


def torch_group(group: ProcessGroup) -> ProcessGroup:
    """The group that torch.distributed accepts: `inner` of an AxisGroup, any other group unchanged."""
    return group.inner if isinstance(group, AxisGroup) else group


def begin_message(group: ProcessGroup, name: str, x: Tensor) -> OpenSpan | None:
    """Note that a message of x's size is issued; returns the listener's span, or None without a listener."""
    if not isinstance(group, AxisGroup):
        return None
    watch = group.watch
    watch.last, watch.last_s = (group.axis, name, x.nbytes), time.monotonic()
    return None if watch.listener is None else watch.listener.begin(group.axis, name, x.nbytes)


def watched(work: Work, span: OpenSpan | None) -> Work:
    """Wrap a message so that waiting for it ends the span; without a span, the message itself."""
    return work if span is None else _WatchedWork(work, span)


def settling(work: Work, group: ProcessGroup, tensors: Sequence[Tensor]) -> Work:
    """Wrap a point-to-point message so that waiting for it calls `Watch.settle` with its tensors."""
    settle = group.watch.settle if isinstance(group, AxisGroup) else None
    return work if settle is None else _SettlingWork(work, settle, tensors)


class _SettlingWork(Work):
    def __init__(self, work: Work, settle: Callable[[Tensor], None], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._settle = work, settle
        self._tensors = tensors  # kept until the wait, or another tensor could be allocated at the same address

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        done = self._work.wait()
        tensors, self._tensors = self._tensors, ()
        for tensor in tensors:
            self._settle(tensor)
        return done


class _WatchedWork(Work):
    def __init__(self, work: Work, span: OpenSpan) -> None:
        super().__init__()
        self._work, self._span = work, span

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._span.waits()
        done = self._work.wait()
        self._span.end()
        return done

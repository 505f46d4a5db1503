"""Process groups that know their axis, and the one place from which a rank's work can be watched.

    mesh.watch.listener = recorder      # from here on the recorder is told of every message and every piece of work
    mesh.watch.listener = None          # as always else: a message is only noted as the last one

Groups are passed to where messages are issued, so what hears of them travels with the groups: nothing has to be
looked up, and two trainers of one process do not hear each other.
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
    """Something that has begun."""

    def waits(self) -> None:
        """From here on the rank stands still until it ends."""

    def end(self) -> None:
        """It is over; of several calls the last counts."""


class Listener(Protocol):
    """Looks on; called by the thread that works, which on CUDA may be autograd's."""

    def begin(self, row: str, name: str, num_bytes: int) -> OpenSpan:
        """`row` is "compute" or an axis of the mesh; `num_bytes` of a message, the larger of its two ends."""


class Watch:
    """Who looks on at the work of one rank: nobody, unless a step is traced.

    Attributes:
        settle: told of each tensor of a message between two ranks when the current stream waits for its end.
        microbatch: whose forward or backward runs.
        last, last_s: axis, name and bytes of the message that was issued last, and when (time.monotonic).
    """

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.settle: Callable[[Tensor], None] | None = None
        self.microbatch = -1
        self.last: tuple[str, str, int] | None = None
        self.last_s = 0.0

    def last_message(self) -> str:
        """For people."""
        if self.last is None:
            return "none yet over an axis of the mesh"
        axis, name, num_bytes = self.last
        return f"{name} over {axis} of {format_bytes(num_bytes)}, {time.monotonic() - self.last_s:.0f} s ago"

    def work(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Around a piece of the rank's own work."""
        return contextlib.nullcontext() if self.listener is None else _told(self.listener, name)


@contextlib.contextmanager
def _told(listener: Listener, name: str) -> Iterator[None]:
    span = listener.begin("compute", name, 0)
    try:
        yield
    finally:
        span.end()


class AxisGroup(ProcessGroup):
    """A process group with the name of its axis, watched together with all others of its mesh.

    It is a ProcessGroup so that it can stand wherever one is asked for, but it cannot communicate itself:
    memo.parallel.collectives hands `inner` to torch. torch refuses the wrapper with "not initialized".
    """

    def __init__(self, inner: ProcessGroup, axis: str, watch: Watch) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # torch's stub knows one signature of two
        self.inner, self.axis, self.watch = inner, axis, watch


def torch_group(group: ProcessGroup) -> ProcessGroup:
    """What torch.distributed takes: the group within an AxisGroup, any other as it is."""
    return group.inner if isinstance(group, AxisGroup) else group


def begin_message(group: ProcessGroup, name: str, x: Tensor) -> OpenSpan | None:
    """Note that a message of x's size is issued, and tell who watches the group, if anybody."""
    if not isinstance(group, AxisGroup):
        return None
    watch = group.watch
    watch.last, watch.last_s = (group.axis, name, x.nbytes), time.monotonic()
    return None if watch.listener is None else watch.listener.begin(group.axis, name, x.nbytes)


def watched(work: Work, span: OpenSpan | None) -> Work:
    """A message under way whose span ends when it has been waited for; without a span the message itself."""
    return work if span is None else _WatchedWork(work, span)


def settling(work: Work, group: ProcessGroup, tensors: Sequence[Tensor]) -> Work:
    """A message between two ranks under way: `Watch.settle` is told of its tensors when it has been waited for."""
    settle = group.watch.settle if isinstance(group, AxisGroup) else None
    return work if settle is None else _SettlingWork(work, settle, tensors)


class _SettlingWork(Work):
    def __init__(self, work: Work, settle: Callable[[Tensor], None], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._settle = work, settle
        self._tensors = tensors  # held until then: another block may lie at the address of one that is freed

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

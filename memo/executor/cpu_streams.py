"""Streams on a CPU: training uses streams that are imitated in the calling thread. Tests also use threads, which show
every order that the interface of memo.executor.streams allows."""

import contextlib
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from torch import Tensor

from memo.executor.streams import COPY_STREAMS, DISK_STREAMS, AccessMode, Event, Stream, Timestamp
from memo.executor.workers import Workers

_QUEUED_STREAMS = (*COPY_STREAMS, *DISK_STREAMS)


class _ClockTimestamp:
    """A timestamp of a stream on the CPU: the clock at the moment at which the stream reached it."""

    def __init__(self) -> None:
        self.at_s = float("nan")

    def reach(self) -> None:
        self.at_s = time.perf_counter()

    def is_reached(self) -> bool:
        return not math.isnan(self.at_s)

    def seconds_since(self, earlier: "_ClockTimestamp") -> float:
        return self.at_s - earlier.at_s


class _Mark(threading.Event):
    """An event: a position in the queue of a stream, set once the stream has reached it."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.stream = stream


class _CpuStreams:
    """The calls that issue at most one task on a stream; `_issue` of a subclass says when it runs."""

    def _issue(self, stream: Stream, task: Callable[[], object]) -> None:
        raise NotImplementedError

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: dst.copy_(src))

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        self._issue(stream, task)

    def record(self, stream: Stream) -> Event:
        mark = _Mark(stream)
        self._issue(stream, mark.set)
        return mark

    def has_happened(self, event: Event | None) -> bool:
        return event is None or event.is_set()

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        pass


class VirtualStreams(_CpuStreams):
    """Streams that are imitated in the calling thread, with a policy that decides when copies run.

    Policies: eager runs every copy when it is issued; lazy runs it as late as the events allow, when something waits
    for it; random runs it at a seeded random time in between. The events allow all three, so a result that depends on
    the policy reveals a missing wait. Training on a CPU uses eager: the cores that compute also copy, without threads.
    """

    def __init__(self, policy: Literal["eager", "lazy", "random"] = "eager", seed: int = 0) -> None:
        self.policy = policy
        self._random = random.Random(seed)
        self._queues: dict[Stream, deque[Callable[[], object]]] = {stream: deque() for stream in _QUEUED_STREAMS}

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._issue(stream, lambda: self._run_until(event))

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self._progress()

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        self._run_until(self.record(stream))
        return contextlib.nullcontext()

    def timestamp(self, stream: Stream) -> Timestamp:
        stamp = _ClockTimestamp()
        if stream not in _QUEUED_STREAMS or self.policy == "eager":
            stamp.reach()
        else:
            self._queues[stream].append(stamp.reach)  # without _progress: measuring must not make copies run
        return stamp

    def synchronize(self) -> None:
        for stream in _QUEUED_STREAMS:
            while self._queues[stream]:
                self._run_first(stream)

    def _issue(self, stream: Stream, task: Callable[[], object]) -> None:
        if stream not in _QUEUED_STREAMS or self.policy == "eager":
            task()
        else:
            self._queues[stream].append(task)
            self._progress()

    def _progress(self) -> None:
        if self.policy == "random":
            for _ in range(self._random.randrange(4)):
                stream = self._random.choice(_QUEUED_STREAMS)
                if self._queues[stream]:
                    self._run_first(stream)

    def _run_until(self, mark: _Mark) -> None:
        # This terminates: an event depends only on what was issued before it, so there are no cyclic waits.
        while not mark.is_set():
            self._run_first(mark.stream)

    def _run_first(self, stream: Stream) -> None:
        self._queues[stream].popleft()()


class ThreadStreams(_CpuStreams):
    """One worker thread for each copy stream and each stream of a disk; compute runs in the caller. CPU only.

    An error in a worker is raised by the next call of any method; the worker goes on, so that no wait hangs.
    """

    def __init__(self) -> None:
        self._workers = Workers([stream.value for stream in COPY_STREAMS])

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._issue(stream, event.wait)
            self._workers.raise_errors()

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self._workers.raise_errors()

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        self.wait(Stream.HOST, self.record(stream))
        return contextlib.nullcontext()

    def timestamp(self, stream: Stream) -> Timestamp:
        stamp = _ClockTimestamp()
        self._issue(stream, stamp.reach)
        return stamp

    def synchronize(self) -> None:
        self._workers.finish()
        self._workers.raise_errors()

    def close(self) -> None:
        """Finish what was issued and end the workers; also done when the object is garbage-collected."""
        self._workers.close()

    def _issue(self, stream: Stream, task: Callable[[], object]) -> None:
        self._workers.raise_errors()
        if stream in _QUEUED_STREAMS:
            self._workers.put(stream.value, task)
        else:
            task()

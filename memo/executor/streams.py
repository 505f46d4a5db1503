"""Streams and events in four calls, for CUDA and for CPU.

The executor orders its copies by `copy`, `record`, `wait` and `access` alone, so the same code runs on CUDA streams,
on a CPU that imitates them deterministically, and on threads. `timestamp` measures, and orders nothing.
"""

import contextlib
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from memo.executor.workers import Workers


class Stream(Enum):
    """The work of one stream runs in the order of issue; only events order the work of different streams."""

    COMPUTE = "compute"  # the stream of the model: the caller's current stream
    OFFLOAD = "offload"  # device to host: waits for compute, and must never delay it
    PREFETCH = "prefetch"  # host to device: a stream of its own, because links are full duplex
    WRITE = "write"  # staging buffers to disk: calls that run in a thread of their own, as those of READ
    READ = "read"  # disk to staging buffers
    HOST = "host"  # what the CPU computes, at once; waiting for an event blocks the calling thread


COPY_STREAMS = (Stream.OFFLOAD, Stream.PREFETCH)
DISK_STREAMS = (Stream.WRITE, Stream.READ)
_QUEUED_STREAMS = (*COPY_STREAMS, *DISK_STREAMS)
_DEVICE_STREAMS = (Stream.COMPUTE, *COPY_STREAMS)

AccessMode = Literal["r", "w"]

Event = Any
"""What `record` returned; only the backend that created it reads it."""


class Timestamp(Protocol):
    """The time at which a stream reaches a point, known once it has reached it."""

    def is_reached(self) -> bool:
        """Whether the stream has reached the point; does not wait."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from a timestamp of the same backend, of any stream, to this one."""


class StreamBackend(Protocol):
    """Buffers have names only for the race checker; the plain backends ignore them."""

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        """Queues dst <- src (same shape and dtype) on a stream."""

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        """Queues work of the CPU on one of DISK_STREAMS, which reads one buffer and writes another."""

    def record(self, stream: Stream) -> Event:
        """An event that happens when everything issued on the stream so far has run."""

    def wait(self, stream: Stream, event: Event | None) -> None:
        """What is issued on the stream from now on runs after the event; with None nothing is waited for.

        A CUDA stream cannot wait for one of DISK_STREAMS: there the calling thread waits, so ask `has_happened` first.
        """

    def has_happened(self, event: Event | None) -> bool:
        """Whether nothing would wait for this event any more."""

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        """Declares that the stream reads or writes a buffer at this point, outside of `copy`."""

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        """Declares that the content of a flat buffer is not valid from this point of the stream on. A backend of tests
        fills it with NaN, so that reading it shows in the results; all others do nothing."""

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """A context in which messages that are started run after what was issued on the stream."""

    def timestamp(self, stream: Stream) -> Timestamp:
        """The time at which everything issued on the stream so far has run; orders and delays nothing."""

    def synchronize(self) -> None:
        """Returns when everything issued on all streams has run."""


class CudaStreams:
    """CUDA streams and events. Creating an instance initializes CUDA; importing this module does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {stream: torch.cuda.Stream(device) for stream in COPY_STREAMS}
        self._disk = Workers()
        self._idle: torch.cuda.Stream | None = None  # for timestamps of a disk's threads

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        # Slots and records are never freed during the run, so record_stream is not needed.
        with torch.cuda.stream(self._stream(stream)):
            dst.copy_(src, non_blocking=True)

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        self._disk.raise_errors()
        self._disk.put(stream.value, task)

    def record(self, stream: Stream) -> Event:
        if stream is Stream.HOST:
            return None  # the CPU has finished its work before it issues anything else
        if stream in DISK_STREAMS:
            return self._disk.record(stream.value)
        # A thread that waits for an event that is not of the blocking kind keeps a core busy.
        event = torch.cuda.Event(blocking=True) if self._disk.have_begun else torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is None:
            return
        if stream in DISK_STREAMS:
            self._disk.put(stream.value, event.wait if isinstance(event, threading.Event) else event.synchronize)
        elif isinstance(event, threading.Event):
            event.wait()
            self._disk.raise_errors()
        elif stream is Stream.HOST:
            event.synchronize()
        else:
            self._stream(stream).wait_event(event)

    def has_happened(self, event: Event | None) -> bool:
        if event is None:
            return True
        return event.is_set() if isinstance(event, threading.Event) else bool(event.query())

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self._disk.raise_errors()

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        pass

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream(stream))

    def timestamp(self, stream: Stream) -> Timestamp:
        stamp = _CudaTimestamp()
        if stream in DISK_STREAMS:
            if self._idle is None:
                self._idle = torch.cuda.Stream(self.device)
            self._disk.put(stream.value, partial(stamp.reach, self._idle))
        else:
            stamp.reach(self._stream(stream))
        return stamp

    def synchronize(self) -> None:
        self._disk.finish()  # they wait for streams of the device, which wait for no thread
        for stream in _DEVICE_STREAMS:
            self._stream(stream).synchronize()
        if self._idle is not None:
            self._idle.synchronize()
        self._disk.raise_errors()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream is Stream.COMPUTE:
            # Read at every call: autograd sets the current stream of its thread to the stream of the forward.
            return torch.cuda.current_stream(self.device)
        return self._streams[stream]


class _CudaTimestamp:
    """An event that is recorded on a stream; by a disk's thread on one without other work, where it happens at once."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self._is_recorded = False

    def reach(self, stream: torch.cuda.Stream) -> None:
        self.event.record(stream)
        self._is_recorded = True

    def is_reached(self) -> bool:
        return self._is_recorded and bool(self.event.query())

    def seconds_since(self, earlier: "_CudaTimestamp") -> float:
        return earlier.event.elapsed_time(self.event) * 1e-3


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


class VirtualStreams:
    """Streams that are imitated in the calling thread, with a policy that decides when copies run.

    Policies: eager runs every copy when it is issued; lazy runs it as late as the events allow, when something waits
    for it; random runs it at a seeded random moment in between. The events allow all three, so a result that depends
    on the policy reveals a missing wait. Training on a CPU uses eager: the cores that compute also copy, without
    threads.
    """

    def __init__(self, policy: Literal["eager", "lazy", "random"] = "eager", seed: int = 0) -> None:
        self.policy = policy
        self._random = random.Random(seed)
        self._queues: dict[Stream, deque[Callable[[], object]]] = {stream: deque() for stream in _QUEUED_STREAMS}

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: dst.copy_(src))

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        self._issue(stream, task)

    def record(self, stream: Stream) -> Event:
        mark = _Mark(stream)
        self._issue(stream, mark.reach)
        return mark

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._issue(stream, lambda: self._run_until(event))

    def has_happened(self, event: Event | None) -> bool:
        return event is None or event.reached

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self._progress()

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        pass

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

    def _run_until(self, mark: "_Mark") -> None:
        # This terminates: an event depends only on what was issued before it, so there are no cyclic waits.
        while not mark.reached:
            self._run_first(mark.stream)

    def _run_first(self, stream: Stream) -> None:
        self._queues[stream].popleft()()


class _Mark:
    """An event of VirtualStreams: a position in the queue of its stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reached = False

    def reach(self) -> None:
        self.reached = True


class ThreadStreams:
    """One worker thread for each copy stream and each stream of a disk; compute runs in the caller. CPU only.

    An error in a worker is raised by the next call of any method; the worker goes on, so that no wait hangs.
    """

    def __init__(self) -> None:
        self._workers = Workers([stream.value for stream in COPY_STREAMS])

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: dst.copy_(src))

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        self._issue(stream, task)

    def record(self, stream: Stream) -> Event:
        event = threading.Event()
        self._issue(stream, event.set)
        return event

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._issue(stream, event.wait)
            self._workers.raise_errors()

    def has_happened(self, event: Event | None) -> bool:
        return event is None or event.is_set()

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self._workers.raise_errors()

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        pass

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

"""Streams and events in four calls, for CUDA and for CPU.

The swap engine orders its copies with nothing but `copy`, `record`, `wait` and `access`, so the same engine
runs on CUDA streams, on a CPU that imitates them deterministically, and on threads. `timestamp` only looks on.
"""

import contextlib
import math
import queue
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Protocol

import torch
from torch import Tensor


class Stream(Enum):
    """Work of one stream runs in the order of issue; only events order streams among each other."""

    COMPUTE = "compute"  # the model's: whatever is current in the caller
    OFFLOAD = "offload"  # device to host: waits for compute, must never hold it up
    PREFETCH = "prefetch"  # host to device: its own stream, because links are full duplex
    HOST = "host"  # what the CPU computes itself, at once: it stands still while it waits for an event


COPY_STREAMS = (Stream.OFFLOAD, Stream.PREFETCH)
_DEVICE_STREAMS = (Stream.COMPUTE, *COPY_STREAMS)

AccessMode = Literal["r", "w"]

Event = Any
"""What `record` returned; only the backend that made it looks inside."""


class Timestamp(Protocol):
    """A point of one stream in time, known once the stream has come to it."""

    def is_reached(self) -> bool:
        """Whether it has; waits for nothing."""

    def seconds_since(self, earlier: Any) -> float:
        """Seconds from a timestamp of the same backend, of any stream, to this one."""


class StreamBackend(Protocol):
    """Buffers have names only for the race checker; the plain backends ignore them."""

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        """Queues dst <- src (same shape and dtype) on a stream."""

    def record(self, stream: Stream) -> Event:
        """An event that happens when everything issued on the stream so far has run."""

    def wait(self, stream: Stream, event: Event | None) -> None:
        """What is issued on the stream from now on runs after the event; None means at once."""

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        """Declares that the stream reads or writes a buffer at this point, outside of `copy`."""

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """Messages that are begun inside come behind what was issued on the stream."""

    def timestamp(self, stream: Stream) -> Timestamp:
        """The time at which everything issued on the stream so far has run; orders and delays nothing."""

    def synchronize(self) -> None:
        """Returns when everything issued on all streams has run."""


class CudaStreams:
    """CUDA streams and events. Creating one starts CUDA on the device; importing this module does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {stream: torch.cuda.Stream(device) for stream in COPY_STREAMS}

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        # Slots and records live as long as the run, so the caching allocator need not know of this use.
        with torch.cuda.stream(self._stream(stream)):
            dst.copy_(src, non_blocking=True)

    def record(self, stream: Stream) -> Event:
        if stream is Stream.HOST:
            return None  # what the CPU has done lies behind everything that is issued from now on
        event = torch.cuda.Event()
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is None:
            return
        if stream is Stream.HOST:
            event.synchronize()
        else:
            self._stream(stream).wait_event(event)

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        pass

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return torch.cuda.stream(self._stream(stream))

    def timestamp(self, stream: Stream) -> Timestamp:
        return _CudaTimestamp(self._stream(stream))

    def synchronize(self) -> None:
        for stream in _DEVICE_STREAMS:
            self._stream(stream).synchronize()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream is Stream.COMPUTE:
            # Asked for at every call: autograd sets the current stream of its thread to that of the forward.
            return torch.cuda.current_stream(self.device)
        return self._streams[stream]


class _CudaTimestamp:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record(stream)

    def is_reached(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: "_CudaTimestamp") -> float:
        return earlier.event.elapsed_time(self.event) * 1e-3


class _ClockTimestamp:
    """Of a stream on the CPU: the clock when its turn came."""

    def __init__(self) -> None:
        self.at_s = float("nan")

    def reach(self) -> None:
        self.at_s = time.perf_counter()

    def is_reached(self) -> bool:
        return not math.isnan(self.at_s)

    def seconds_since(self, earlier: "_ClockTimestamp") -> float:
        return self.at_s - earlier.at_s


class VirtualStreams:
    """Streams imitated in the calling thread, with a choice of when copies run.

    Policies: eager runs every copy when it is issued; lazy as late as the events allow (when compute waits
    for it); random at seeded moments in between. The same events allow all three, so a result that depends
    on the policy shows a missing wait. Eager is what a real CPU run wants: the cores that compute copy the
    memory at once, without threads or hand-over.
    """

    def __init__(self, policy: Literal["eager", "lazy", "random"] = "eager", seed: int = 0) -> None:
        self.policy = policy
        self._random = random.Random(seed)
        self._queues: dict[Stream, deque[Callable[[], object]]] = {stream: deque() for stream in COPY_STREAMS}

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: dst.copy_(src))

    def record(self, stream: Stream) -> Event:
        mark = _Mark(stream)
        self._issue(stream, mark.reach)
        return mark

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
        if stream not in COPY_STREAMS or self.policy == "eager":
            stamp.reach()
        else:
            self._queues[stream].append(stamp.reach)  # without progress: looking on must not make copies run
        return stamp

    def synchronize(self) -> None:
        for stream in COPY_STREAMS:
            while self._queues[stream]:
                self._run_first(stream)

    def _issue(self, stream: Stream, task: Callable[[], object]) -> None:
        if stream not in COPY_STREAMS or self.policy == "eager":
            task()
        else:
            self._queues[stream].append(task)
            self._progress()

    def _progress(self) -> None:
        if self.policy == "random":
            for _ in range(self._random.randrange(4)):
                stream = self._random.choice(COPY_STREAMS)
                if self._queues[stream]:
                    self._run_first(stream)

    def _run_until(self, mark: "_Mark") -> None:
        # Ends: what an event needs was issued before it, so tasks never wait for each other in a circle.
        while not mark.reached:
            self._run_first(mark.stream)

    def _run_first(self, stream: Stream) -> None:
        self._queues[stream].popleft()()


class _Mark:
    """An event of VirtualStreams: a place in its stream's queue."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.reached = False

    def reach(self) -> None:
        self.reached = True


class ThreadStreams:
    """One worker thread for each copy stream; compute runs in the caller. CPU only.

    An error inside a worker is raised by the next call of any method; the worker goes on, so nobody hangs.
    """

    def __init__(self) -> None:
        self._workers = {stream: _Worker(stream.value) for stream in COPY_STREAMS}
        self._stop = weakref.finalize(self, _stop_all, list(self._workers.values()))

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: dst.copy_(src))

    def record(self, stream: Stream) -> Event:
        event = threading.Event()
        self._issue(stream, event.set)
        return event

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._issue(stream, event.wait)
            self._raise_errors()

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self._raise_errors()

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        self.wait(Stream.HOST, self.record(stream))
        return contextlib.nullcontext()

    def timestamp(self, stream: Stream) -> Timestamp:
        stamp = _ClockTimestamp()
        self._issue(stream, stamp.reach)
        return stamp

    def synchronize(self) -> None:
        events = [threading.Event() for _ in self._workers]
        # Drains before it raises: after an error, too, nothing may still be on its way.
        for worker, event in zip(self._workers.values(), events, strict=True):
            worker.tasks.put(event.set)
        for event in events:
            event.wait()
        self._raise_errors()

    def close(self) -> None:
        """Finishes what was issued and ends the workers; happens by itself when the object is dropped."""
        self._stop()

    def _issue(self, stream: Stream, task: Callable[[], object]) -> None:
        self._raise_errors()
        if stream not in COPY_STREAMS:
            task()
        else:
            self._workers[stream].tasks.put(task)

    def _raise_errors(self) -> None:
        for worker in self._workers.values():
            if worker.errors:
                first = worker.errors[0]
                worker.errors.clear()
                raise first


class _Worker:
    def __init__(self, name: str) -> None:
        self.tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.errors: list[BaseException] = []
        self.thread = threading.Thread(target=self._run, name=f"memo-{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (task := self.tasks.get()) is not None:
            try:
                task()
            except BaseException as error:  # reported by the next call; an event behind it must still happen
                self.errors.append(error)


def _stop_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.tasks.put(None)
    for worker in workers:
        # The last reference to the backend may die in a worker, as part of a finished task.
        if worker.thread is not threading.current_thread():
            worker.thread.join()

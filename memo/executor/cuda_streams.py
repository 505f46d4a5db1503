"""Streams of a GPU and threads for its disk: the interface of memo.executor.streams on CUDA streams and events."""

import contextlib
import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from memo.executor.streams import COPY_STREAMS, DISK_STREAMS, AccessMode, Event, Stream, Timestamp
from memo.executor.workers import Workers

_DEVICE_STREAMS = (Stream.COMPUTE, *COPY_STREAMS)


class CudaStreams:
    """CUDA streams and events. Creating an instance initializes CUDA; importing this module does not."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._streams = {stream: torch.cuda.Stream(device) for stream in COPY_STREAMS}
        self._disk = Workers()
        self._idle: torch.cuda.Stream | None = None  # on which disk threads record timestamps

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
        # A disk thread that waits for an event keeps a core busy, unless the event is of the blocking kind.
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
        self._disk.finish()  # first: disk threads wait for device streams, which never wait for a thread
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
    """An event that is recorded on a stream. A disk thread records it on an idle stream, where it happens at once."""

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

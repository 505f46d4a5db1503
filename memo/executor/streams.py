"""Streams and events in four calls, for CUDA and for CPU.

The executor orders its copies by `copy`, `record`, `wait` and `access` alone, so the same code runs on CUDA streams
(memo.executor.cuda_streams), on a CPU that imitates them deterministically, and on threads (memo.executor.cpu_streams).
`timestamp` measures, and orders nothing.
"""

import contextlib
from collections.abc import Callable
from enum import Enum
from typing import Any, Literal, Protocol

from torch import Tensor


class Stream(Enum):
    """The work of one stream runs in the order of issue; only events order the work of different streams."""

    COMPUTE = "compute"  # the stream of the model: the caller's current stream
    OFFLOAD = "offload"  # device to host: waits for compute, and must never delay it
    PREFETCH = "prefetch"  # host to device: a stream of its own, because links are full duplex
    WRITE = "write"  # staging buffers to disk: calls that run in a thread of their own
    READ = "read"  # disk to staging buffers: calls that run in a second thread
    HOST = "host"  # work of the CPU, which runs at once; waiting for an event blocks the calling thread


COPY_STREAMS = (Stream.OFFLOAD, Stream.PREFETCH)
DISK_STREAMS = (Stream.WRITE, Stream.READ)

AccessMode = Literal["r", "w"]

Event = Any
"""The result of `record`; only the backend that created it reads it."""


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
        """Make work that is issued on the stream from now on run after the event; None: there is nothing to wait for.

        A CUDA stream cannot wait for one of DISK_STREAMS: there the calling thread waits, so ask `has_happened` first.
        """

    def has_happened(self, event: Event | None) -> bool:
        """Whether a wait for this event would return at once."""

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        """Declares that the stream reads or writes a buffer at this point, outside of `copy`."""

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        """Declares that the content of a flat buffer is not valid from this point of the stream on. A backend of tests
        fills it with NaN, so that reading it shows in the results; all others do nothing."""

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        """A context; messages that start in it run after everything issued on the stream."""

    def timestamp(self, stream: Stream) -> Timestamp:
        """The time at which everything issued on the stream so far has run; orders and delays nothing."""

    def synchronize(self) -> None:
        """Returns when everything issued on all streams has run."""

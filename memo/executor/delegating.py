"""A backend that passes all calls to another backend: the base of backends that intercept a few calls."""

import contextlib
from collections.abc import Callable

from torch import Tensor

from memo.executor.streams import AccessMode, Event, Stream, StreamBackend, Timestamp


class DelegatingBackend:
    """A memo.executor.streams.StreamBackend; subclasses override the calls that they intercept."""

    def __init__(self, backend: StreamBackend) -> None:
        self.backend = backend

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self.backend.copy(stream, dst, src, dst_name, src_name)

    def wait(self, stream: Stream, event: Event | None) -> None:
        self.backend.wait(stream, event)

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        self.backend.call(stream, task, reads, writes)

    def record(self, stream: Stream) -> Event:
        return self.backend.record(stream)

    def has_happened(self, event: Event | None) -> bool:
        return self.backend.has_happened(event)

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self.backend.access(stream, buffer_name, mode, what)

    def spoil(self, stream: Stream, buffer: Tensor, name: str) -> None:
        self.backend.spoil(stream, buffer, name)

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return self.backend.issuing(stream)

    def timestamp(self, stream: Stream) -> Timestamp:
        return self.backend.timestamp(stream)

    def synchronize(self) -> None:
        self.backend.synchronize()

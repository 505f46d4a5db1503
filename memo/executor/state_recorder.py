"""What the copies of streamed states take, and how long anybody stood still for them; see memo.executor.recorder."""

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor

from memo.executor.states import StateStreamer
from memo.executor.streams import AccessMode, Event, Stream, StreamBackend, Timestamp


class StateRecorder:
    """A backend in front of another one that puts timestamps around copies and around waits of the compute stream."""

    def __init__(self, backend: StreamBackend) -> None:
        self.backend = backend
        self._copies: list[tuple[Timestamp, Timestamp]] = []
        self._waits: list[tuple[Timestamp, Timestamp]] = []
        self._host_wait_s = 0.0

    def copies_s(self) -> float:
        """Of both directions, together; waits for the device, as `waited_s`."""
        self.backend.synchronize()
        return sum(end.seconds_since(begin) for begin, end in self._copies)

    def waited_s(self) -> float:
        """For which the compute stream, or after the last backward the CPU, stood still for them."""
        self.backend.synchronize()
        return self._host_wait_s + sum(end.seconds_since(begin) for begin, end in self._waits)

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        begin = self.backend.timestamp(stream)
        self.backend.copy(stream, dst, src, dst_name, src_name)
        self._copies.append((begin, self.backend.timestamp(stream)))

    def record(self, stream: Stream) -> Event:
        return self.backend.record(stream)

    def wait(self, stream: Stream, event: Event | None) -> None:
        if stream is Stream.HOST:
            begin_s = time.perf_counter()
            self.backend.wait(stream, event)
            self._host_wait_s += time.perf_counter() - begin_s
        elif stream is Stream.COMPUTE and event is not None:
            begin = self.backend.timestamp(stream)
            self.backend.wait(stream, event)
            self._waits.append((begin, self.backend.timestamp(stream)))
        else:
            self.backend.wait(stream, event)

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        self.backend.access(stream, buffer_name, mode, what)

    def issuing(self, stream: Stream) -> contextlib.AbstractContextManager[object]:
        return self.backend.issuing(stream)

    def timestamp(self, stream: Stream) -> Timestamp:
        return self.backend.timestamp(stream)

    def synchronize(self) -> None:
        self.backend.synchronize()


@contextlib.contextmanager
def record_states(states: StateStreamer) -> Iterator[StateRecorder]:
    """Records from here to the end of the block; begin between two steps."""
    backend = states.backend
    recorder = states.backend = StateRecorder(backend)
    try:
        yield recorder
    finally:
        states.backend = backend

"""What the copies of streamed states take, and how long anybody stood still for them; see memo.executor.recorder."""

import contextlib
import time
from collections.abc import Iterator

from torch import Tensor

from memo.executor.states import StateStreamer
from memo.executor.streams import AccessMode, Event, Stream, StreamBackend, Timestamp


class _Spans:
    """Pairs of timestamps, until they are read."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Timestamp, Timestamp]] = []

    def add(self, begin: Timestamp, end: Timestamp) -> None:
        self._pairs.append((begin, end))

    def take_s(self) -> float:
        """Seconds of those that have ended, together. The others are kept for a later call; waits for nothing."""
        taken_s, still_open = 0.0, []
        for begin, end in self._pairs:
            if end.is_reached():
                taken_s += end.seconds_since(begin)
            else:
                still_open.append((begin, end))
        self._pairs = still_open
        return taken_s


class StateRecorder:
    """A backend in front of another one that puts timestamps around copies and around waits of the compute stream.

    What the device has not come to when it is read, such as weights that the optimizer has just sent up, counts when it
    is read next: nothing is lost, nothing counts twice, and nobody waits.
    """

    def __init__(self, backend: StreamBackend, earlier: "StateRecorder | None" = None) -> None:
        """`earlier` recorded an earlier step, and leaves to this one what it could not read."""
        self.backend = backend
        self._copies: _Spans = earlier._copies if earlier else _Spans()
        self._waits: _Spans = earlier._waits if earlier else _Spans()
        self._host_wait_s = 0.0

    def take_copies_s(self) -> float:
        """Of both directions, together."""
        return self._copies.take_s()

    def take_waited_s(self) -> float:
        """For which the compute stream, or after the last backward the CPU, stood still for them."""
        waited_s, self._host_wait_s = self._host_wait_s + self._waits.take_s(), 0.0
        return waited_s

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        begin = self.backend.timestamp(stream)
        self.backend.copy(stream, dst, src, dst_name, src_name)
        self._copies.add(begin, self.backend.timestamp(stream))

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
            self._waits.add(begin, self.backend.timestamp(stream))
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
def record_states(states: StateStreamer, earlier: StateRecorder | None = None) -> Iterator[StateRecorder]:
    """Records from here to the end of the block; begin between two steps. `earlier`: see StateRecorder."""
    backend = states.backend
    recorder = states.backend = StateRecorder(backend, earlier)
    try:
        yield recorder
    finally:
        states.backend = backend

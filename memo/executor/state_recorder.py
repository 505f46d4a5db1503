"""Times the copies of streamed states, and the waits for them; see memo.executor.recorder."""

import time

from torch import Tensor

from memo.executor.delegating import DelegatingBackend
from memo.executor.streams import Event, Stream, StreamBackend, Timestamp


class _Spans:
    """Pairs of timestamps that have not been read yet."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Timestamp, Timestamp]] = []

    def add(self, begin: Timestamp, end: Timestamp) -> None:
        self._pairs.append((begin, end))

    def take_s(self) -> float:
        """Return the seconds of all pairs that have ended; keeps open pairs for a later call, and never waits."""
        taken_s, still_open = 0.0, []
        for begin, end in self._pairs:
            if end.is_reached():
                taken_s += end.seconds_since(begin)
            else:
                still_open.append((begin, end))
        self._pairs = still_open
        return taken_s


class StateRecorder(DelegatingBackend):
    """A backend that passes all calls to another backend, and takes timestamps around copies and waits of compute.

    Work that the device has not reached when the times are read, such as the copies of weights that the optimizer has
    just issued, is counted at the next reading. Nothing is lost or counted twice, and reading does not wait.
    """

    def __init__(self, backend: StreamBackend, earlier: "StateRecorder | None" = None) -> None:
        """`earlier`: the recorder of an earlier step, whose unread times this one takes over."""
        super().__init__(backend)
        self._copies: _Spans = earlier._copies if earlier else _Spans()
        self._waits: _Spans = earlier._waits if earlier else _Spans()
        self._host_wait_s = 0.0

    def take_copies_s(self) -> float:
        """Seconds of copies since the last call, the sum of both directions."""
        return self._copies.take_s()

    def take_waited_s(self) -> float:
        """Seconds since the last call for which the compute stream, or the CPU after the last backward, waited."""
        waited_s, self._host_wait_s = self._host_wait_s + self._waits.take_s(), 0.0
        return waited_s

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        begin = self.backend.timestamp(stream)
        self.backend.copy(stream, dst, src, dst_name, src_name)
        self._copies.add(begin, self.backend.timestamp(stream))

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

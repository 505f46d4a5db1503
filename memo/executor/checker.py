"""Happens-before checker: finds every race that the events of a run allow, whether or not it occurred.

Each stream counts its accesses and keeps a vector clock: for every other stream, the number of accesses that it knows
to have ended. An event carries its stream's clock; waiting for it merges the clocks (Mattern, 1988; the use for races
as in FastTrack, Flanagan and Freund, 2009). Two accesses to one buffer, of which at least one is a write, are ordered
if they share a stream, or if the stream of the later access knew of the earlier access. The verdict depends on the
order of issue alone, never on timing.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from memo.errors import RaceError
from memo.executor.delegating import DelegatingBackend
from memo.executor.streams import AccessMode, Event, Stream, StreamBackend

_VERB = {"r": "reads", "w": "writes"}


@dataclass(frozen=True)
class _Access:
    stream: Stream
    count: int
    mode: AccessMode
    what: str

    def __str__(self) -> str:
        return f"{self.what!r} on {self.stream.value} {_VERB[self.mode]} it"


@dataclass
class _History:
    """The accesses to one buffer that a later access must follow; they imply all older accesses."""

    write: _Access | None = None
    reads: dict[Stream, _Access] = field(default_factory=dict)


@dataclass(frozen=True)
class _CheckedEvent:
    inner: Event
    clock: dict[Stream, int]


class Checked(DelegatingBackend):
    """A backend that checks every copy and every declared access, and passes them to another backend."""

    def __init__(self, backend: StreamBackend) -> None:
        super().__init__(backend)
        self._clocks = {stream: dict.fromkeys(Stream, 0) for stream in Stream}
        self._histories: dict[str, _History] = {}

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        what = f"copy {src_name} -> {dst_name}"
        self._check(stream, src_name, "r", what)
        self._check(stream, dst_name, "w", what)
        self.backend.copy(stream, dst, src, dst_name, src_name)

    def call(self, stream: Stream, task: Callable[[], object], reads: str, writes: str) -> None:
        what = f"{stream.value} {reads} -> {writes}"
        self._check(stream, reads, "r", what)
        self._check(stream, writes, "w", what)
        self.backend.call(stream, task, reads, writes)

    def record(self, stream: Stream) -> Event:
        return _CheckedEvent(self.backend.record(stream), dict(self._clocks[stream]))

    def wait(self, stream: Stream, event: Event | None) -> None:
        if event is not None:
            self._learn(stream, event.clock)
            self.backend.wait(stream, event.inner)

    def has_happened(self, event: Event | None) -> bool:
        return event is None or self.backend.has_happened(event.inner)

    def access(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        """Raises RaceError, as `copy` does, naming the buffer, both accesses and their streams."""
        self._check(stream, buffer_name, mode, what)
        self.backend.access(stream, buffer_name, mode, what)

    def synchronize(self) -> None:
        self.backend.synchronize()
        for stream in Stream:
            for other in Stream:
                self._learn(stream, {other: self._clocks[other][other]})

    def _learn(self, stream: Stream, clock: dict[Stream, int]) -> None:
        own = self._clocks[stream]
        for other, count in clock.items():
            own[other] = max(own[other], count)

    def _check(self, stream: Stream, buffer_name: str, mode: AccessMode, what: str) -> None:
        clock = self._clocks[stream]
        clock[stream] += 1
        access = _Access(stream, clock[stream], mode, what)
        history = self._histories.setdefault(buffer_name, _History())
        earlier = [history.write] if history.write is not None else []
        if mode == "w":
            earlier += history.reads.values()
        for other in earlier:
            if clock[other.stream] < other.count:
                raise RaceError(
                    f"race on {buffer_name}: {access}, while {other}, and no event orders them:"
                    f" {stream.value} must wait for an event that {other.stream.value} records after its access"
                )
        if mode == "w":
            self._histories[buffer_name] = _History(write=access)
        else:
            history.reads[stream] = access

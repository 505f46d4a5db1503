"""Records of a swapper that lie on a disk: obeys a disk plan, with staging buffers in pinned host memory.

Four streams hand a record on, each waiting for the event of the one before it:

    offload:   slot -> buffer     waits until the buffer's last turn has ended
    write:     buffer -> disk     waits for the offload, and until the record's last content was read
    read:      disk -> buffer     waits until the buffer's last turn has ended, and until the record is written
    prefetch:  buffer -> slot     waits for the read

No stream of a device can wait for a thread. So a prefetch is issued when its read has ended, at the latest when its
layer begins, and then the caller waits; a read begins as many turns ahead as there are buffers.
"""

from collections import deque
from collections.abc import Sequence

from torch import Tensor

from memo.executor.record_file import RecordFile
from memo.executor.streams import Event, Stream, StreamBackend
from memo.planner.disk_plan import DiskPlan, Turn


class Staging:
    """The buffers of one swapper and its part of a file; the swapper calls it in the order of the plan."""

    def __init__(
        self,
        plan: DiskPlan,
        buffers: Sequence[Tensor],
        file: RecordFile,
        first: int = 0,
        name: str = "",
    ) -> None:
        """`buffers`: plan.num_buffers of file.stride_bytes; `first`: the place in the file of the plan's first record;
        `name`: begins the names of buffers and records, for the checker of races.
        """
        self.plan, self.buffers, self.file, self._first, self._name = plan, buffers, file, first, name
        self._reads = [turn for turn in plan.turns if turn.begins_after != turn.step]
        self.reset()

    def reset(self) -> None:
        """Begin a training step after one that was cut short, whose copies and transfers have ended."""
        # Of each buffer the last use; of each record of the plan the last transfer; of each read its end, by step.
        self._used: list[Event | None] = [None] * self.plan.num_buffers
        self._moved: dict[int, Event] = {}
        self._arrived: dict[int, Event] = {}
        self.next_step()

    def next_step(self) -> None:
        """Begin a training step after a whole one."""
        self._reads_left = deque(self._reads)
        self._occupied = [False] * self.plan.num_buffers  # by a read whose prefetch has not been issued

    def has(self, record: int | None) -> bool:
        return record in self.plan.place_of

    def buffer(self, step: int) -> tuple[Tensor, str]:
        """Where the activations of this step of the swap plan pass, and its name."""
        index = self.plan.turn_of[step].buffer
        return self.buffers[index], self._buffer_name(index)

    def is_free(self, step: int) -> bool:
        """Whether the turn before that of this step, in the same buffer, was issued to its end."""
        return not self._occupied[self.plan.turn_of[step].buffer]

    def before_offload(self, step: int, backend: StreamBackend) -> None:
        backend.wait(Stream.OFFLOAD, self._used[self.plan.turn_of[step].buffer])

    def after_offload(self, step: int, offloaded: Event, backend: StreamBackend) -> None:
        """Write what has been copied into the buffer."""
        turn = self.plan.turn_of[step]
        buffer, place = self.buffers[turn.buffer], self._place(turn.record)
        backend.wait(Stream.WRITE, offloaded)
        backend.wait(Stream.WRITE, self._moved.get(turn.record))
        names = self._buffer_name(turn.buffer), self._record_name(turn.record)
        backend.call(Stream.WRITE, lambda: self.file.write(place, buffer), *names)
        self._used[turn.buffer] = self._moved[turn.record] = backend.record(Stream.WRITE)

    def read_ahead(self, done: int, backend: StreamBackend) -> None:
        """Begin every read that may begin when the steps up to `done` have been issued."""
        while self._reads_left and self._reads_left[0].begins_after <= done:
            turn = self._reads_left[0]
            if self._occupied[turn.buffer]:
                return
            self._read(turn, backend)
            self._reads_left.popleft()

    def has_arrived(self, step: int, backend: StreamBackend) -> bool:
        """Whether the read for this step has ended."""
        return step in self._arrived and backend.has_happened(self._arrived[step])

    def before_prefetch(self, step: int, backend: StreamBackend) -> None:
        backend.wait(Stream.PREFETCH, self._arrived.pop(step))

    def after_prefetch(self, step: int, prefetched: Event) -> None:
        buffer = self.plan.turn_of[step].buffer
        self._used[buffer], self._occupied[buffer] = prefetched, False

    def _read(self, turn: Turn, backend: StreamBackend) -> None:
        buffer, place = self.buffers[turn.buffer], self._place(turn.record)
        backend.wait(Stream.READ, self._used[turn.buffer])
        backend.wait(Stream.READ, self._moved[turn.record])
        names = self._record_name(turn.record), self._buffer_name(turn.buffer)
        backend.call(Stream.READ, lambda: self.file.read(place, buffer), *names)
        self._arrived[turn.step] = self._moved[turn.record] = backend.record(Stream.READ)
        self._occupied[turn.buffer] = True

    def _place(self, record: int) -> int:
        return self._first + self.plan.place_of[record]

    def _buffer_name(self, index: int) -> str:
        return f"{self._name}buffer{index}"

    def _record_name(self, record: int) -> str:
        return f"{self._name}record{record} on disk"

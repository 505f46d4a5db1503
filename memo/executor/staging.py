"""Moves swappers' records to and from a disk, as a disk plan says, through staging buffers in pinned host memory.

A record passes through four streams, each of which waits for an event of the stream before it:

    offload:   slot -> buffer     waits until the buffer's last turn has ended
    write:     buffer -> disk     waits for the offload, and until the record's old content was read
    read:      disk -> buffer     waits until the buffer's last turn has ended, and until the record is written
    prefetch:  buffer -> slot     waits for the read

A device stream cannot wait for a thread, so a prefetch is issued only when its read has ended. If its layer begins
before that, the calling thread waits. A read begins as many turns ahead as there are buffers.

If records have parts, each part has a swapper of its own, and all swappers share the buffers.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence

from torch import Tensor

from memo.errors import PlanError
from memo.executor.record_file import RecordFile
from memo.executor.recorder import BeginSpan, timed
from memo.executor.streams import Event, Stream, StreamBackend
from memo.planner.disk_plan import DiskPlan, Turn
from memo.planner.swap import SwapStep
from memo.report.timeline import Row


class Staging:
    """The buffers and the file of a disk plan; its swappers call it in the order of the plan.

    A turn is one use of a buffer (memo.planner.disk_plan); methods take its number in the plan.
    """

    def __init__(
        self,
        steps: Sequence[SwapStep],
        plan: DiskPlan,
        buffers: Sequence[Tensor],
        file: RecordFile,
        backend: StreamBackend,
        name: str = "",
    ) -> None:
        """`steps`: the steps of the swap plan; `buffers`: plan.num_buffers tensors of file.stride_bytes bytes; `name`:
        prefix of the names of buffers and records for the race checker.
        """
        self._steps, self.plan, self.buffers, self.file = steps, plan, buffers, file
        self._backend, self._name = backend, name
        self.listeners: list[BeginSpan] = []  # called at transfers
        self._reads = [number for number, turn in enumerate(plan.turns) if turn.is_read]
        self.reset()

    def reset(self) -> None:
        """Begin a training step after an interrupted one, whose copies and transfers have ended."""
        # The last use of each buffer, the last transfer of each place in the file, and the end of each turn's read.
        self._used: list[Event | None] = [None] * self.plan.num_buffers
        self._moved: dict[int, Event] = {}
        self._arrived: dict[int, Event] = {}
        # Prefetches that wait for the disk, in the order of their turns.
        self._due: deque[tuple[int, Callable[[], None]]] = deque()
        self.next_step()

    def next_step(self) -> None:
        """Begin a training step after a complete one."""
        self._next_turn = 0  # the turn that a swapper must begin next
        self._begun: set[int] = set()
        self._ended: set[int] = set()
        self._num_reads = 0  # reads that have begun

    def turn(self, step: int, part: int) -> int | None:
        """The turn for the activations of this step of the swap plan; None if their record is in memory."""
        return self.plan.turn_of.get((step, part))

    def buffer(self, number: int) -> tuple[Tensor, str]:
        """The staging buffer of a turn, and its name."""
        index = self.plan.turns[number].buffer
        return self.buffers[index], f"{self._name}buffer{index}"

    def before_offload(self, number: int) -> None:
        """Issue the prefetches that must empty the buffer first. Raises PlanError unless this turn comes next."""
        self._require_turn(number)
        while not self._may_begin(number):
            self._issue_first()
        self._backend.wait(Stream.OFFLOAD, self._used[self.plan.turns[number].buffer])

    def after_offload(self, number: int, offloaded: Event) -> None:
        """Write the buffer to disk after the copy into it."""
        turn, place, (buffer, buffer_name) = self.plan.turns[number], self._place(number), self.buffer(number)
        self._backend.wait(Stream.WRITE, offloaded)
        self._backend.wait(Stream.WRITE, self._moved.get(place))
        with self._timed("write", turn):
            self._backend.call(
                Stream.WRITE, lambda: self.file.write(place, buffer), buffer_name, self._record_name(turn)
            )
        self._used[turn.buffer] = self._moved[place] = self._backend.record(Stream.WRITE)
        self._begun.add(number)
        self._end(number)

    def await_read(self, number: int, prefetch: Callable[[], None]) -> None:
        """Queue `prefetch`, which is called when the record has been read, or earlier if a later call must wait for it.

        Raises PlanError unless this turn comes next.
        """
        self._require_turn(number)
        self._due.append((number, prefetch))

    def issue_read(self) -> None:
        """Issue the due prefetches whose records have been read from disk; never waits."""
        while self._due:
            number = self._due[0][0]
            if number not in self._arrived or not self._backend.has_happened(self._arrived[number]):
                return
            self._issue_first()

    def issue_until(self, number: int | None) -> None:
        """Issue the prefetch of this turn, if it is due, and all due prefetches before it."""
        while any(due == number for due, _ in self._due):
            self._issue_first()

    def before_prefetch(self, number: int) -> None:
        self._backend.wait(Stream.PREFETCH, self._arrived.pop(number))

    def after_prefetch(self, number: int, prefetched: Event) -> None:
        self._used[self.plan.turns[number].buffer] = prefetched
        self._end(number)

    def _require_turn(self, number: int) -> None:
        if number != self._next_turn:
            turn = self.plan.turns[number]
            raise PlanError(
                f"part {turn.part} of record {turn.record} passes in turn {number} of the disk plan, but turn "
                f"{self._next_turn} comes next: plan for the schedule that runs"
            )
        self._next_turn += 1

    def _issue_first(self) -> None:
        _, prefetch = self._due.popleft()
        prefetch()

    def _may_begin(self, number: int) -> bool:
        turn = self.plan.turns[number]
        is_free = turn.last_of_buffer is None or turn.last_of_buffer in self._ended
        return is_free and (turn.last_of_record is None or turn.last_of_record in self._begun)

    def _end(self, number: int) -> None:
        """Mark the turn as issued to its end, and begin every read that may begin now."""
        self._ended.add(number)
        while self._num_reads < len(self._reads) and self._may_begin(self._reads[self._num_reads]):
            self._read(self._reads[self._num_reads])
            self._num_reads += 1

    def _read(self, number: int) -> None:
        turn, place, (buffer, buffer_name) = self.plan.turns[number], self._place(number), self.buffer(number)
        self._backend.wait(Stream.READ, self._used[turn.buffer])
        self._backend.wait(Stream.READ, self._moved[place])
        with self._timed("read", turn):
            self._backend.call(Stream.READ, lambda: self.file.read(place, buffer), self._record_name(turn), buffer_name)
        self._arrived[number] = self._moved[place] = self._backend.record(Stream.READ)
        self._begun.add(number)

    def _timed(self, row: Row, turn: Turn) -> contextlib.AbstractContextManager[None]:
        return timed(self.listeners, row, self._steps[turn.step], turn.part if self.plan.parts > 1 else None)

    def _place(self, number: int) -> int:
        return self.plan.file_index(self.plan.turns[number])

    def _record_name(self, turn: Turn) -> str:
        part = f"part {turn.part} " if self.plan.parts > 1 else ""
        return f"{self._name}{part}record{turn.record} on disk"

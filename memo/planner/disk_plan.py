"""Which host records of a swap plan lie on a disk, and the turns of the staging buffers through which they pass.

A record on disk is written from a staging buffer after its offload, and read into one ahead of its prefetch. The
buffers take turns in the order of the plan: turn n uses buffer n mod num_buffers, so its next content is known. One
stage, four records of which 0 and 1 are on disk, two buffers:

    compute    F0  F1          F2          F3   ...   B3   B2          B1          B0
    offload        0 > buffer 0    1 > buffer 1  ...
    write              buffer 0 > disk  buffer 1 > disk
    read                                   disk > buffer 0   (both as soon as the buffer is written, long before they
                                           disk > buffer 1    are due)
    prefetch                                               buffer 0 > 1    buffer 1 > 0

Where layers are swept along the sequence, a record of keys and values has a part for each section. The parts of all
records share the buffers, in the order in which sections finish with them: the first part first in a forward, the last
part first in a backward.

`memo.executor.staging` obeys the plan.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memo.planner.swap import SwapPlan


class Turn(NamedTuple):
    """One use of a staging buffer, for a part of a record that moves after a step of the swap plan.

    A turn of an offload ends with the write to the disk, and a turn of a prefetch with that prefetch.

    Attributes:
        step: index of the step whose activations pass.
        part: number of the part of the record, from 0.
        last_of_buffer: number of the buffer's previous turn, which must have ended before; None: there is none.
        last_of_record: number of the previous turn of this part of this record, which must have begun before.
    """

    step: int
    part: int
    record: int
    buffer: int
    is_read: bool
    last_of_buffer: int | None
    last_of_record: int | None


@dataclass(frozen=True)
class DiskPlan:
    """All turns of one training step, in order; `records` of the swap plan are on disk, in this order in the file.

    Attributes:
        num_buffers: staging buffers, each for one part of a record.
        parts: equal parts of a record, each with a place of its own in the file.
    """

    records: tuple[int, ...]
    num_buffers: int
    turns: tuple[Turn, ...]
    parts: int = 1

    @cached_property
    def turn_of(self) -> dict[tuple[int, int], int]:
        """{(index of the step whose activations pass, part of its record): number of the turn}."""
        return {(turn.step, turn.part): number for number, turn in enumerate(self.turns)}

    @cached_property
    def place_of(self) -> dict[int, int]:
        """{number of a record in the swap plan: its number among those on disk}."""
        return {record: place for place, record in enumerate(self.records)}

    def file_index(self, turn: Turn) -> int:
        """Index in the file of this turn's part of its record: all records of part 0, then all of part 1."""
        return turn.part * len(self.records) + self.place_of[turn.record]


class DiskPlans(NamedTuple):
    """The plans of records on disk: those of slots; and where layers are swept those of inputs and of keys and
    values."""

    sections: DiskPlan | None = None
    inputs: DiskPlan | None = None
    keys: DiskPlan | None = None


NOTHING_ON_DISK = DiskPlans()


def disk_plan(plan: SwapPlan, num_on_disk: int, num_buffers: int, parts: int = 1) -> DiskPlan:
    """Put `num_on_disk` records on disk: those that wait longest for their prefetch, which leaves the disk most time.

    Args:
        parts: parts of a record, each of which has a slot of its own that follows `plan`.
    """
    records = longest_waiting(plan, num_on_disk)
    return DiskPlan(records, num_buffers, _turns(plan, set(records), num_buffers, parts), parts)


def longest_waiting(plan: SwapPlan, count: int) -> tuple[int, ...]:
    """The `count` records of a plan that wait longest, in ascending order."""
    waits = mean_waits(plan) if count else [0.0] * plan.num_records
    return tuple(sorted(sorted(range(plan.num_records), key=lambda record: (-waits[record], record))[:count]))


def mean_waits(plan: SwapPlan) -> list[float]:
    """For each record the mean number of steps from an offload into it to the prefetch of its content."""
    filled = [0] * plan.num_records
    waited, tenants = [0] * plan.num_records, [0] * plan.num_records
    for index, step in enumerate(plan.steps):
        if step.offload and step.record is not None:
            filled[step.record] = index
            tenants[step.record] += 1
        if step.next_prefetch is not None:
            record = plan.steps[step.next_prefetch].record
            assert record is not None
            waited[record] += index - filled[record]
    return [steps / max(1, count) for steps, count in zip(waited, tenants, strict=True)]


def _turns(plan: SwapPlan, on_disk: set[int], num_buffers: int, parts: int) -> tuple[Turn, ...]:
    turns: list[Turn] = []
    last: dict[tuple[int, int], int] = {}  # (record, part) -> number of its last turn
    for step, record, part, is_read in _transfers_through_staging(plan, on_disk, parts):
        number = len(turns)
        of_buffer = number - num_buffers if number >= num_buffers else None
        turns.append(Turn(step, part, record, number % num_buffers, is_read, of_buffer, last.get((record, part))))
        last[record, part] = number
    return tuple(turns)


def _transfers_through_staging(plan: SwapPlan, on_disk: set[int], parts: int) -> Iterator[tuple[int, int, int, bool]]:
    """(index of the step whose activations pass, record, part, whether it is read), in the order of the run."""
    for index, step in enumerate(plan.steps):
        if step.offload and step.record in on_disk:
            yield from ((index, step.record, part, False) for part in range(parts))
        if step.next_prefetch is None:
            continue
        record = plan.steps[step.next_prefetch].record
        if record in on_disk:
            assert record is not None
            free = range(parts) if step.op.kind == "F" else range(parts)[::-1]  # a backward finishes the last one first
            yield from ((step.next_prefetch, record, part, True) for part in free)

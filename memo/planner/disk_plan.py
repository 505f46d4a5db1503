"""Which host records of a swap plan lie on a disk, and the turns of the staging buffers through which they pass.

A record on disk is written from a staging buffer after its offload, and read into one ahead of its prefetch. The
buffers take turns in the order of the plan: turn n is of buffer n mod num_buffers, so what comes next in it is known.
One stage, four records of which 0 and 1 are on disk, two buffers:

    compute    F0  F1          F2          F3   ...   B3   B2          B1          B0
    offload        0 > buffer 0    1 > buffer 1  ...
    write              buffer 0 > disk  buffer 1 > disk
    read                                   disk > buffer 0   (both as soon as the buffer is written, long before they
                                           disk > buffer 1    are due)
    prefetch                                               buffer 0 > 1    buffer 1 > 0

Where layers are swept along the sequence, a record of keys and values has a part for each section. The parts of all
records share the buffers, in the order in which sections are done with them: the first part first in a forward, the
last part first in a backward.

`memo.executor.staging` obeys it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memo.errors import PlanError
from memo.planner.swap import SwapPlan, SwapStep


@dataclass(frozen=True)
class Turn:
    """One use of a staging buffer, by what moves after a step of the swap plan.

    A turn of a forward that offloads ends with the write to the disk, and one of a backward that awaits a prefetch with
    that prefetch.

    Attributes:
        step: index of the step whose activations pass.
        part: of the record, from 0.
        last_of_buffer: the number of the turn that must have ended before this one may begin; None: there is none.
        last_of_record: the number of the turn of the same part of the same record that must have begun before.
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
        num_buffers: staging buffers, each of one part of a record.
        parts: equal parts of a record, each of which has a place of its own in the file.
    """

    records: tuple[int, ...]
    num_buffers: int
    turns: tuple[Turn, ...]
    parts: int = 1

    @cached_property
    def turn_of(self) -> dict[tuple[int, int], int]:
        """The number of a turn, by index of the step whose activations pass and the part of its record."""
        return {(turn.step, turn.part): number for number, turn in enumerate(self.turns)}

    @cached_property
    def place_of(self) -> dict[int, int]:
        """The number of a record among those on disk, by its number in the swap plan."""
        return {record: place for place, record in enumerate(self.records)}

    def file_index(self, turn: Turn) -> int:
        """Where in the file that part of the record is: all records of part 0, then all of part 1."""
        return turn.part * len(self.records) + self.place_of[turn.record]


class DiskPlans(NamedTuple):
    """What is on disk of the records of slots, and where layers are swept of the inputs and of keys and values."""

    sections: DiskPlan | None = None
    inputs: DiskPlan | None = None
    keys: DiskPlan | None = None


NOTHING_ON_DISK = DiskPlans()


def disk_plan(plan: SwapPlan, num_on_disk: int, num_buffers: int, parts: int = 1) -> DiskPlan:
    """Put as many records on disk; those whose contents wait longest for their prefetch, which leaves most time.

    Args:
        parts: of a record, each of which has a slot of its own that follows `plan`.

    Raises PlanError for more records than there are, and where there is no buffer to pass them through.
    """
    if not 0 <= num_on_disk <= plan.num_records or (num_on_disk and num_buffers < 1):
        raise PlanError(
            f"{num_on_disk} of {plan.num_records} records cannot be on disk with {num_buffers} staging buffers: put at "
            "most all of them there, with at least one buffer"
        )
    records = longest_waiting(plan, num_on_disk)
    return DiskPlan(records, num_buffers, _turns(plan, set(records), num_buffers, parts), parts)


def longest_waiting(plan: SwapPlan, count: int) -> tuple[int, ...]:
    """So many of a plan's records, in ascending order."""
    waits = mean_waits(plan)
    return tuple(sorted(sorted(range(plan.num_records), key=lambda record: (-waits[record], record))[:count]))


def mean_waits(plan: SwapPlan) -> list[float]:
    """By record, the number of steps from an offload into it to the prefetch of what lies there, on average."""
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
    last: dict[tuple[int, int], int] = {}  # by record and part, the number of the last turn
    for step, record, part, is_read in _passages(plan, on_disk, parts):
        number = len(turns)
        of_buffer = number - num_buffers if number >= num_buffers else None
        turns.append(Turn(step, part, record, number % num_buffers, is_read, of_buffer, last.get((record, part))))
        last[record, part] = number
    return tuple(turns)


def _passages(plan: SwapPlan, on_disk: set[int], parts: int) -> Iterator[tuple[int, int, int, bool]]:
    """(index of the step whose activations pass, record, part, whether to the device), in the order of the run."""
    for index, step in enumerate(plan.steps):
        if step.offload and step.record in on_disk:
            yield from ((index, step.record, part, False) for part in range(parts))
        if step.next_prefetch is None:
            continue
        record = plan.steps[step.next_prefetch].record
        if record in on_disk:
            assert record is not None
            yield from ((step.next_prefetch, record, part, True) for part in _in_order(step, parts))


def _in_order(step: SwapStep, parts: int) -> range:
    """Parts of a record in the order in which they are free after this step: a backward is done with the last first."""
    return range(parts) if step.op.kind == "F" else range(parts)[::-1]

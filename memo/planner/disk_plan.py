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

`memo.executor.staging` obeys it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memo.errors import PlanError
from memo.planner.swap import SwapPlan


@dataclass(frozen=True)
class Turn:
    """One use of a staging buffer, by what moves after a step of the swap plan.

    Attributes:
        step: index of the step whose activations pass: a forward that offloads, or a backward that awaits a prefetch.
        begins_after: index of the step after which the disk may begin; for a write that is `step`.
        ends_after: index of the step after which the last use of the buffer is due: for a read the prefetch.
    """

    step: int
    record: int
    buffer: int
    begins_after: int
    ends_after: int


@dataclass(frozen=True)
class DiskPlan:
    """All turns of one training step, in order; `records` of the swap plan are on disk, in this order in the file."""

    records: tuple[int, ...]
    num_buffers: int
    turns: tuple[Turn, ...]

    @cached_property
    def turn_of(self) -> dict[int, Turn]:
        """By index of the step whose activations pass."""
        return {turn.step: turn for turn in self.turns}

    @cached_property
    def place_of(self) -> dict[int, int]:
        """The number of a record in the file, by its number in the swap plan."""
        return {record: place for place, record in enumerate(self.records)}


class DiskPlans(NamedTuple):
    """What is on disk of the records of slots, and where layers are swept of the inputs and of keys and values."""

    sections: DiskPlan | None = None
    inputs: DiskPlan | None = None
    keys: DiskPlan | None = None


NOTHING_ON_DISK = DiskPlans()


def disk_plan(plan: SwapPlan, num_on_disk: int, num_buffers: int) -> DiskPlan:
    """Put as many records on disk; those whose contents wait longest for their prefetch, which leaves most time.

    Raises PlanError for more records than there are, and where there is no buffer to pass them through.
    """
    if not 0 <= num_on_disk <= plan.num_records or (num_on_disk and num_buffers < 1):
        raise PlanError(
            f"{num_on_disk} of {plan.num_records} records cannot be on disk with {num_buffers} staging buffers: put at "
            "most all of them there, with at least one buffer"
        )
    records = longest_waiting(plan, num_on_disk)
    return DiskPlan(records, num_buffers, tuple(_turns(plan, set(records), num_buffers)))


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


def _turns(plan: SwapPlan, on_disk: set[int], num_buffers: int) -> Iterator[Turn]:
    """Reads begin in the order of their turns, once the last turn of their buffer ends and their record is written."""
    ends: list[int] = []
    written: dict[int, int] = {}
    last_read = -1
    for index, step in enumerate(plan.steps):
        if step.offload and step.record in on_disk:
            written[step.record] = index
            yield Turn(index, step.record, len(ends) % num_buffers, index, index)
            ends.append(index)
        if step.next_prefetch is None:
            continue
        record = plan.steps[step.next_prefetch].record
        if record in on_disk:
            assert record is not None
            before = ends[-num_buffers] if len(ends) >= num_buffers else -1
            last_read = max(last_read, before, written[record])
            yield Turn(step.next_prefetch, record, len(ends) % num_buffers, last_read, index)
            ends.append(index)

"""Where each parameter lies in the flat buffers: buckets, slots and shards as plain data.

    bucket   | slot: embedding | slot: layers.3.mlp.fc2 | ... | padding |
    shards   |   rank 0   |   rank 1   |   rank 2   |   rank 3          |      (dp x cp ranks)

A bucket is what one reduce-scatter moves. Its size is a multiple of the number of shards, so a shard may
begin in the middle of a parameter.
"""

import math
from dataclasses import dataclass

from memo.parallel.shards import Replicated

ALIGNMENT = 64
"""Elements: every parameter starts at a multiple of 128 bytes in bf16, as tensor-core GEMMs like it."""


@dataclass(frozen=True)
class Slot:
    """One parameter's place in a bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Segment:
    """Part of a slot that lies in one shard.

    Attributes:
        start, stop: range in the flattened local parameter.
        shard_offset: where `start` lies within the shard.
    """

    slot: Slot
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True)
class BucketPlan:
    """Slots of one bucket; all share `replicated`, so one extra reduction serves the whole bucket."""

    slots: tuple[Slot, ...]
    size: int
    num_shards: int
    replicated: Replicated

    @property
    def shard_size(self) -> int:
        return self.size // self.num_shards

    def segments(self, shard: int) -> list[Segment]:
        """The parts of parameters that shard number `shard` holds."""
        first, last = shard * self.shard_size, (shard + 1) * self.shard_size
        parts = []
        for slot in self.slots:
            start, stop = max(first, slot.offset), min(last, slot.offset + slot.numel)
            if start < stop:
                parts.append(Segment(slot, start - slot.offset, stop - slot.offset, start - first))
        return parts


def plan_buckets(
    parameters: list[tuple[str, tuple[int, ...], Replicated]], bucket_size: int, num_shards: int
) -> list[BucketPlan]:
    """Lay parameters out in the order given, which should be the order their gradients appear in.

    Parameters that are replicated in the same way share buckets; a bucket is closed once it holds
    bucket_size elements. A tied embedding gets the same bucket on the first and the last stage,
    alone in it, so that both stages shard it alike.
    """
    closed: list[BucketPlan] = []
    open_slots: dict[Replicated, list[Slot]] = {}
    for name, shape, replicated in parameters:
        slots = open_slots.setdefault(replicated, [])
        slot = Slot(name, shape, _end(slots))
        slots.append(slot)
        if _end(slots) >= bucket_size:
            closed.append(_close(open_slots.pop(replicated), num_shards, replicated))
    return closed + [_close(slots, num_shards, kind) for kind, slots in open_slots.items() if slots]


def _end(slots: list[Slot]) -> int:
    if not slots:
        return 0
    return _round_up(slots[-1].offset + slots[-1].numel, ALIGNMENT)


def _close(slots: list[Slot], num_shards: int, replicated: Replicated) -> BucketPlan:
    return BucketPlan(tuple(slots), _round_up(_end(slots), ALIGNMENT * num_shards), num_shards, replicated)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple

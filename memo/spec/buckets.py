"""Places of parameters in the flat buffers: buckets, ranges and shards as plain data.

    bucket   | embedding    | layers.3.mlp.fc2      | ... | padding |
    shards   |   rank 0   |   rank 1   |   rank 2   |   rank 3      |      (dp x cp ranks)

One reduce-scatter moves one bucket. The size of a bucket is a multiple of the number of shards, so a shard may begin in
the middle of a parameter. A bucket closes once it is full and at the end of each module, so that the states of one
layer are a unit that can move.

    unit     embedding | layer | layer | ... | head and final norm
    bucket   | . | . |  | . |.| | . |.|       | . |.|                  (each of one kind of replication and of one unit)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import sub
from typing import Any, NamedTuple

from memo.config import ModelConfig, RunConfig
from memo.spec.parameters import end_weights
from memo.spec.placement import spread
from memo.spec.shapes import shape_of
from memo.spec.stack import of_stage, stack_of
from memo.spec.weights import Replicated, Weight
from memo.units import round_up

ALIGNMENT = 64
"""In elements: every parameter starts at a multiple of 128 bytes in bf16, which suits tensor-core GEMMs."""


@dataclass(frozen=True)
class ParameterRange:
    """One parameter's place in a bucket, in elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, flat: Any) -> Any:
        """The view of the parameter in a flat tensor of the bucket's size."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


@dataclass(frozen=True)
class Segment:
    """The part of a span that lies in one shard.

    Attributes:
        start, stop: range in the flattened local parameter.
        shard_offset: where `start` lies within the shard.
    """

    range: ParameterRange
    start: int
    stop: int
    shard_offset: int


@dataclass(frozen=True)
class BucketPlan:
    """The parameters of one bucket. All share `replicated`, so that one extra reduction serves the whole bucket. Either
    all are trained, or all are `frozen`; a frozen bucket may be `coded`."""

    ranges: tuple[ParameterRange, ...]
    size: int
    num_shards: int
    replicated: Replicated
    frozen: bool = False
    coded: bool = False

    @property
    def numel(self) -> int:
        """Elements of the parameters, without padding."""
        return sum(span.numel for span in self.ranges)

    @property
    def shard_size(self) -> int:
        return self.size // self.num_shards

    def segments(self, shard: int) -> list[Segment]:
        """The parts of parameters that shard number `shard` holds."""
        first, last = shard * self.shard_size, (shard + 1) * self.shard_size
        parts = []
        for span in self.ranges:
            start, stop = max(first, span.offset), min(last, span.offset + span.numel)
            if start < stop:
                parts.append(Segment(span, start - span.offset, stop - span.offset, start - first))
        return parts


class ParameterShape(NamedTuple):
    """A parameter as far as its place depends on it; parameters of one `kind` share buckets."""

    name: str
    shape: tuple[int, ...]
    replicated: Replicated = ""
    frozen: bool = False
    coded: bool = False

    @property
    def kind(self) -> tuple[Replicated, bool, bool]:
        return self.replicated, self.frozen, self.coded


def plan_buckets(parameters: Sequence[ParameterShape], bucket_size: int, num_shards: int) -> list[BucketPlan]:
    """Lay parameters out in the order given, which should be the order in which their gradients appear.

    Parameters of one kind, replicated alike and trained or frozen alike, share buckets; a bucket is closed once it
    holds bucket_size elements. A tied embedding is alone in its bucket, the same on the first and the last stage, so
    that both stages shard it alike.
    """
    closed: list[BucketPlan] = []
    open_ranges: dict[tuple[Replicated, bool, bool], list[ParameterRange]] = {}
    for laid in parameters:
        ranges = open_ranges.setdefault(laid.kind, [])
        span = ParameterRange(laid.name, laid.shape, _end(ranges))
        ranges.append(span)
        if _end(ranges) >= bucket_size:
            closed.append(_close(open_ranges.pop(laid.kind), num_shards, *laid.kind))
    return closed + [_close(ranges, num_shards, *kind) for kind, ranges in open_ranges.items() if ranges]


class Unit(NamedTuple):
    """Elements of the buckets of one module, with padding unless said otherwise.

    Attributes:
        size: trained weights.
        numel: trained weights without padding.
        largest: the largest bucket of trained weights.
        frozen: frozen weights that are not coded.
        coded: coded weights.
        largest_coded: the largest bucket of coded weights.
    """

    size: int
    numel: int
    largest: int
    frozen: int = 0
    coded: int = 0
    largest_coded: int = 0

    @property
    def weights(self) -> int:
        """All weights in the dtype of the model, with padding."""
        return self.size + self.frozen


@dataclass(frozen=True)
class RankUnits:
    """Units of one rank of a stage: its layers, chunk by chunk, and those of the model's ends that the stage has."""

    layers: tuple[Unit, ...]
    ends: tuple[Unit, ...]

    @cached_property
    def layer(self) -> Unit:
        """The largest of all layers in each number; ranges have room for it."""
        return Unit(*map(max, zip(*self.layers, strict=True)))

    @cached_property
    def layer_weights(self) -> int:
        """The most weights of a layer, trained and frozen together."""
        return max(layer.weights for layer in self.layers)

    def first(self, count: int) -> Unit:
        """The sum of the first `count` layers that go to host memory."""
        return self._firsts[count]

    def rest(self, count: int) -> Unit:
        """The sum of all other layers."""
        every = self._firsts[-1]
        return Unit(*map(sub, every, self._firsts[count])) if count else every

    @cached_property
    def end(self) -> Unit:
        """The sum of the ends."""
        return Unit(*map(sum, zip(Unit(0, 0, 0), *self.ends, strict=True)))

    @cached_property
    def _firsts(self) -> list[Unit]:
        turns = spread(len(self.layers))
        found = [Unit(0, 0, 0)]
        for position in sorted(range(len(turns)), key=turns.__getitem__):
            found.append(Unit(*map(sum, zip(found[-1], self.layers[position], strict=True))))
        return found


def rank_units(config: RunConfig, world_size: int, stage: int) -> RankUnits:
    """Units of a rank of pipeline stage `stage`, to the element."""
    parallel = config.parallel
    shards = parallel.dp(world_size) * parallel.cp
    parts = (parallel.tp, parallel.pp, parallel.vpp, parallel.ddp_bucket_size, shards)
    return _rank_units(config.model, config.model.position_rows(config.data.seq_length), stage, *parts)


@lru_cache(maxsize=1024)
def _rank_units(
    model: ModelConfig, positions: int, stage: int, tp: int, pp: int, vpp: int, bucket_size: int, shards: int
) -> RankUnits:
    """The body of `rank_units`. Cached, and so are its parts: a search asks for the same few again and again."""
    shape = shape_of(model, "", positions)
    ends = [end for end in end_weights(shape, pp, stage) if end]
    units = tuple(_unit(module_buckets(end, tp, bucket_size, shards)) for end in ends)
    kinds = of_stage(stack_of(model), pp, vpp, stage)
    return RankUnits(tuple(layer_unit(kind, tp, bucket_size, shards) for kind in kinds), units)


@lru_cache(maxsize=256)
def layer_unit(model: ModelConfig, tp: int, bucket_size: int, num_shards: int) -> Unit:
    """The unit of one transformer layer of a model whose layers are alike."""
    return _unit(module_buckets(shape_of(model, "", 0).layer_weights, tp, bucket_size, num_shards))


@lru_cache(maxsize=256)
def module_buckets(weights: tuple[Weight, ...], tp: int, bucket_size: int, num_shards: int) -> tuple[BucketPlan, ...]:
    """The buckets of one layer or one end, from its last parameter to its first, as gradients appear."""
    layout = [ParameterShape(w.name, w.local_shape(tp), w.replicated, w.frozen, w.coded) for w in reversed(weights)]
    return tuple(plan_buckets(layout, bucket_size, num_shards))


def _unit(buckets: Sequence[BucketPlan]) -> Unit:
    trained = [bucket for bucket in buckets if not bucket.frozen]
    sizes = [bucket.size for bucket in trained]
    frozen = sum(bucket.size for bucket in buckets if bucket.frozen and not bucket.coded)
    coded = [bucket.size for bucket in buckets if bucket.coded]
    numel = sum(bucket.numel for bucket in trained)
    return Unit(sum(sizes), numel, max(sizes, default=0), frozen, sum(coded), max(coded, default=0))


def _end(ranges: list[ParameterRange]) -> int:
    if not ranges:
        return 0
    return round_up(ranges[-1].offset + ranges[-1].numel, ALIGNMENT)


def _close(
    ranges: list[ParameterRange], num_shards: int, replicated: Replicated, frozen: bool, coded: bool
) -> BucketPlan:
    """A bucket of these ranges; coded buckets are not sharded."""
    shards = 1 if coded else num_shards
    return BucketPlan(tuple(ranges), round_up(_end(ranges), ALIGNMENT * shards), shards, replicated, frozen, coded)

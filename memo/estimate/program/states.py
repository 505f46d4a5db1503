"""Weights, gradients and optimizer states of one rank, to the byte, with the buckets that move them."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memo.config import RunConfig
from memo.estimate.state_memory import state_bytes, state_sizes
from memo.spec.buckets import BucketPlan, module_buckets, stage_modules
from memo.spec.placement import LayerPlaces, placement_of


class Bucket(NamedTuple):
    """`owner`: position in the stage's modules (memo.spec.buckets.stage_modules)."""

    owner: int
    plan: BucketPlan

    @property
    def size(self) -> int:
        """Elements, padding included."""
        return self.plan.size


@dataclass(frozen=True)
class States:
    """Bytes of one rank.

    Attributes:
        slots, staging: on the device, of layers whose weights or gradients come and go.
        host: in the host arena, which is no part of the total.
        num_shards: dp x cp.
        buckets: in the order in which backward completes them.
        places: by the owner of a bucket.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    slots: int
    staging: int
    host: int
    num_shards: int
    buckets: tuple[Bucket, ...]
    places: dict[int, LayerPlaces]

    @cached_property
    def total(self) -> int:
        """Of the device."""
        return self.weights + self.gradients + self.masters + self.moments + self.slots + self.staging


def rank_states(config: RunConfig, world_size: int, stage: int) -> States:
    """Of a rank of pipeline stage `stage`, where the configuration places them."""
    sizes = state_sizes(config, world_size)
    buckets = []
    for owner, weights in reversed([*enumerate(stage_modules(config, stage))]):
        plans = module_buckets(weights, config.parallel.tp, config.parallel.ddp_bucket_size, sizes.shards)
        buckets += [Bucket(owner, plan) for plan in plans]
    places = _places(config, world_size, {bucket.owner for bucket in buckets})
    states = state_bytes(config, world_size, stage)
    masters = 0
    if sizes.has_masters:
        elements = sum(bucket.size for bucket in buckets if not places[bucket.owner].optimizer_on_host)
        masters = elements // sizes.shards * sizes.wide
    return States(
        weights=states.weights,
        gradients=states.gradients,
        masters=masters,
        moments=states.optimizer - masters,
        slots=states.slots,
        staging=states.staging,
        host=states.host,
        num_shards=sizes.shards,
        buckets=tuple(buckets),
        places=places,
    )


def _places(config: RunConfig, world_size: int, owners: set[int]) -> dict[int, LayerPlaces]:
    """By owner: layers are counted over the chunks of a rank, embedding and head stand around each chunk."""
    placement = placement_of(config, world_size)
    per_chunk = config.model.num_layers // (config.parallel.pp * config.parallel.vpp)
    places = {}
    for owner in owners:
        chunk, within = divmod(owner, per_chunk + 2)
        is_layer = 1 <= within <= per_chunk
        places[owner] = placement.of_layer(chunk * per_chunk + within - 1) if is_layer else placement.of_ends
    return places

"""The buckets of one rank's weights and gradients, and where the states of each module lie."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import layers_per_chunk
from memo.estimate.state_memory import state_sizes
from memo.spec.buckets import BucketPlan, module_buckets, stage_modules
from memo.spec.placement import LayerPlaces, placement_of
from memo.spec.weights import Weight


class OwnedBucket(NamedTuple):
    """A bucket and the number of its module among those of the stage (memo.spec.buckets.stage_modules), `owner`."""

    owner: int
    plan: BucketPlan

    @property
    def size(self) -> int:
        """Number of elements, padding included."""
        return self.plan.size


@dataclass(frozen=True)
class StateLayout:
    """The states of one rank.

    Attributes:
        num_shards: dp x cp.
        buckets: in the order in which the backward completes their gradients, without those that are coded.
        places: where the states of each module lie, by the owner of its buckets.
    """

    num_shards: int
    buckets: tuple[OwnedBucket, ...]
    places: dict[int, LayerPlaces]


def state_layout(config: RunConfig, world_size: int, stage: int) -> StateLayout:
    """The layout of a rank of pipeline stage `stage`, with the placement of the configuration."""
    num_shards = state_sizes(config, world_size).shards
    buckets: list[OwnedBucket] = []
    last: Sequence[Weight] = ()
    plans: tuple[BucketPlan, ...] = ()
    for owner, weights in reversed([*enumerate(stage_modules(config, stage))]):
        if weights is not last:  # those of the layers of a kind are the same
            of_all = module_buckets(tuple(weights), config.parallel.tp, config.parallel.ddp_bucket_size, num_shards)
            plans = tuple(plan for plan in of_all if not plan.coded)
            last = weights
        buckets += [OwnedBucket(owner, plan) for plan in plans]
    places = _places(config, world_size, {bucket.owner for bucket in buckets})
    return StateLayout(num_shards, tuple(buckets), places)


def _places(config: RunConfig, world_size: int, owners: set[int]) -> dict[int, LayerPlaces]:
    """By owner: layers are counted over all chunks of a rank; each chunk also counts an embedding and a head."""
    placement = placement_of(config, world_size)
    per_chunk = layers_per_chunk(config)
    places = {}
    for owner in owners:
        chunk, within = divmod(owner, per_chunk + 2)
        is_layer = 1 <= within <= per_chunk
        places[owner] = placement.of_layer(chunk * per_chunk + within - 1) if is_layer else placement.of_ends
    return places

"""Groups the parameters of a model into units, plans their buckets, and allocates memory for both."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from memo.parallel.quantized import CodedBucket
from memo.parallel.shards import ShardedParameter
from memo.parallel.units import Bucket, Carver, HostMemory, HostRules, Unit, aligned_bytes, host_sizes
from memo.spec.buckets import BucketPlan, ParameterShape, plan_buckets
from memo.spec.placement import LayerPlaces, StatePlacement
from memo_kernels import wide_dtype


@dataclass(frozen=True)
class UnitPlan:
    """The plan of a unit, before its memory is allocated."""

    layer: int | None
    places: LayerPlaces
    buckets: tuple[BucketPlan, ...]


def plan_units(
    named: Mapping[str, ShardedParameter], bucket_size: int, num_shards: int, placement: StatePlacement | None
) -> list[UnitPlan]:
    """Plan units in the order of `named`, which should be the order in which backward produces gradients.

    No bucket spans two layers. So the placement does not change which gradients are reduced together.
    """
    plans = []
    for layer, names in in_units(list(named), _layer_positions(list(named))):
        shards = {name: named[name].shard for name in names}
        layout = [
            ParameterShape(name, tuple(named[name].shape), of.replicated, of.frozen, of.coded)
            for name, of in shards.items()
        ]
        places = LayerPlaces()
        if placement is not None:
            places = placement.of_ends if layer is None else placement.of_layer(layer)
        plans.append(UnitPlan(layer, places, tuple(plan_buckets(layout, bucket_size, num_shards))))
    return plans


def make_units(
    plans: list[UnitPlan],
    rules: HostRules,
    rank: int,
    dtype: torch.dtype,
    device: torch.device,
    host_memory: Callable[[int], HostMemory] | None,
) -> tuple[list[Unit], HostMemory | None]:
    """Allocate the units of rank `rank` in the group that shards the states, and their host arena if they need one."""
    needed_bytes = host_bytes(plans, dtype, rules)
    host, carver, rings = None, None, list[Tensor]()
    if needed_bytes:
        assert host_memory is not None, "a placement in host memory needs host memory"
        host = host_memory(needed_bytes)
        carver = Carver(host.record(0))
        if rules.consumes:
            rings = [carver.take(size, wide_dtype(dtype)) for size in ring_sizes(plans)]
    units, num_in_ring = [], 0
    for plan in plans:
        record = None
        if rings and plan.layer is not None and plan.places.optimizer_on_host:
            record = num_in_ring % len(rings)
            num_in_ring += 1
        buckets, used = [], 0
        for bucket in (each for each in plan.buckets if not each.coded):
            ring = None
            if record is not None and not bucket.frozen:
                ring = (record, rings[record][used : used + bucket.shard_size])
                used += bucket.shard_size
            buckets.append(Bucket(bucket, rank, dtype, device, plan.places, carver, rules=rules, ring=ring))
        coded = tuple(CodedBucket(each, rules.quantize, device) for each in plan.buckets if each.coded)
        units.append(Unit(plan.layer, plan.places, tuple(buckets), coded))
    return units, host


def ring_sizes(plans: list[UnitPlan]) -> list[int]:
    """Elements of each record in the ring of reduced gradients: one record is written while the CPU reads the other."""
    layers = [unit.buckets for unit in plans if unit.layer is not None and unit.places.optimizer_on_host]
    sizes = [sum(bucket.shard_size for bucket in buckets if not bucket.frozen) for buckets in layers]
    return [max(sizes, default=0)] * min(2, len(layers))


def host_bytes(plans: list[UnitPlan], dtype: torch.dtype, rules: HostRules) -> int:
    """Bytes of the arena in host memory that these units need."""
    sizes = [(size, wide_dtype(dtype)) for size in ring_sizes(plans)] if rules.consumes else []
    for unit in plans:
        in_ring = rules.consumes and unit.layer is not None
        for bucket in unit.buckets:
            sizes += host_sizes(bucket, unit.places, rules, dtype, in_ring=in_ring).values()
    return sum(aligned_bytes(numel * of.itemsize) for numel, of in sizes)


def in_units(names: list[str], layer_of: Callable[[str], int | None]) -> Iterator[tuple[int | None, list[str]]]:
    """Group consecutive names by layer, embedding and head; yields each group with its layer's position or None."""
    group: list[str] = []
    for name in names:
        if group and _key(group[-1], layer_of) != _key(name, layer_of):
            yield layer_of(group[0]), group
            group = []
        group.append(name)
    if group:
        yield layer_of(group[0]), group


def _key(name: str, layer_of: Callable[[str], int | None]) -> object:
    layer = layer_of(name)
    return layer if layer is not None else name.split(".")[:2]


def _layer_positions(names: list[str]) -> Callable[[str], int | None]:
    """Return a function from a parameter's name to its layer's position on this rank; None outside of layers."""
    found = {match.groups() for name in names if (match := _IN_LAYER.match(name))}
    order = sorted((int(chunk), int(layer)) for chunk, layer in found)
    positions = {key: position for position, key in enumerate(order)}

    def layer_of(name: str) -> int | None:
        match = _IN_LAYER.match(name)
        return None if match is None else positions[int(match[1]), int(match[2])]

    return layer_of


_IN_LAYER = re.compile(r"(\d+)\.layers\.(\d+)\.")

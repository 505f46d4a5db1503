"""Bytes of weights, gradients and optimizer states of one rank under a placement: closed forms, exact to the byte.

A layer has P elements in its buckets, the states are sharded over N = dp x cp ranks, and an element takes n bytes in
the dtype of the model, w bytes in that of gradients and masters, and m bytes in its two moments. One layer takes

    its states are                    of the device                        of the host arena
    resident                          P n + P w + P w/N [1] + P m/N        0
    with the optimizer on the host    P n + P w                            2 P w/N + P m/N (master, gradient; moments)
    ... and the gradient in a slot    less P w, plus P w/N [2]             plus P w    [3]
    ... and the weights in a slot     less P n, plus P n/N [4]             plus P n/N  [1], the copy in n bytes

    [1] the master (or copy), only if n differs from w      [3] with several microbatches, unless each is reduced
    [2] ZeRO-2 with the optimizer on the device             [4] ZeRO-3 with the optimizer on the device

Frozen weights take n bytes an element wherever the weights are: on the device, or as shards in host memory. Weights in
few bits (memo.spec.quantized) are whole on the device, and all layers share P n for the weights dequantised from them.
All layers share at most 2 slots of P n for weights and 2 of P w for gradients and, if N > 1, a staging buffer of P n/N
or P w/N for each slot. On the host they share 2 staging buffers for the shard of the largest bucket whose weights are
copied back whole.

If N = 1, the record of the reduced gradient also holds the sum between microbatches. Without clipping and with one
microbatch per step, a layer on the host is updated as soon as its gradient arrives, so two records of gradients serve
all layers. Embedding and head keep their weights and gradients on the device. Source: memo.spec.placement, which
memo.parallel and memo.executor implement.
"""

from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_dtype
from memo.config.model import Quantization
from memo.spec.buckets import RankUnits, rank_units
from memo.spec.moments import moment_bytes
from memo.spec.parameters import count_parameters, shape_of_run
from memo.spec.placement import NUM_STATE_SLOTS, StatePlacement, placement_of
from memo.spec.quantized import coded_bytes, workspace_bytes
from memo.units import element_bytes


class StateBytes(NamedTuple):
    """Bytes of one rank. All fields but `host` are bytes of its device.

    Attributes:
        weights, gradients, masters, moments: states that stay on the device, whole or as this rank's shard.
        slots: rounding buffers for weights and gradients that stream.
        staging: buffers for shards before they are gathered or after they are reduced, and for masters before a cast.
        host: the arena in host memory.
    """

    weights: int
    gradients: int
    masters: int
    moments: int
    slots: int
    staging: int
    host: int

    @property
    def optimizer(self) -> int:
        return self.masters + self.moments

    @property
    def device(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.slots + self.staging


class StateSizes(NamedTuple):
    """Sizes on which the bytes of states depend, besides the number of elements.

    Attributes:
        narrow, wide: bytes of an element of the weights, and of gradients and masters.
        moments: bytes of the two moments of a parameter, together.
        shards: number of shards, dp x cp.
        clips: whether gradients are clipped, so that an update must wait for the norm of all gradients.
        quantize: the format of coded weights.
    """

    narrow: int
    wide: int
    moments: int
    shards: int
    microbatches: int
    clips: bool
    quantize: Quantization = "none"

    @property
    def has_masters(self) -> bool:
        return self.narrow != self.wide


def state_bytes(config: RunConfig, world_size: int, stage: int, placement: StatePlacement | None = None) -> StateBytes:
    """Bytes of a rank of pipeline stage `stage`; `placement` defaults to that of the configuration.

    --device auto counts as cpu. Known error: none in the sizes of the table above. Where the parameters do not divide
    evenly among the shards, moments are counted as those of the rank that has the most.
    """
    placement = placement or placement_of(config, world_size)
    return placed_bytes(rank_units(config, world_size, stage), placement, state_sizes(config, world_size))


def state_sizes(config: RunConfig, world_size: int) -> StateSizes:
    narrow, wide = element_bytes(resolved_dtype(config.training, config.hardware.device))
    return StateSizes(
        narrow,
        wide,
        sum(moment_bytes(config.training, wide)),
        config.parallel.dp(world_size) * config.parallel.cp,
        num_microbatches(config, world_size),
        config.training.clip_grad > 0,
        config.model.quantize,
    )


def checkpoint_bytes(config: RunConfig, world_size: int) -> int:
    """Bytes of one checkpoint on disk: the master and the two moments of every trained weight. Frozen weights count too
    if they come from no Hugging Face directory, except those in few bits.

    Known error: none for the values. The index and the state of the run, about 100 bytes per rectangle, are not
    counted.
    """
    sizes, shape = state_sizes(config, world_size), shape_of_run(config)
    trained, coded = shape.trained_parameters, shape.coded_parameters
    frozen = count_parameters(config) - trained - coded
    is_saved = config.checkpoint.pretrained_checkpoint is None
    return (sizes.wide + sizes.moments) * trained + sizes.narrow * frozen * is_saved


def placed_bytes(units: RankUnits, placement: StatePlacement, sizes: StateSizes) -> StateBytes:
    """Bytes of a rank with these units under a placement."""
    narrow, wide, layer = sizes.narrow, sizes.wide, units.layer
    in_weight_slots, in_gradient_slots = placement.weights_in_slots, placement.gradients_in_slots
    ends, here = units.end, units.rest(placement.optimizer)
    here_size, here_numel = here.size, here.numel
    if not placement.ends_on_host:
        here_size, here_numel = here_size + ends.size, here_numel + ends.numel
    masters = _shard(here_size, sizes) * wide if sizes.has_masters else 0
    weight_shards = _shard(here.weights, sizes) if placement.shards_weights else 0
    gradient_shards = _shard(here.size, sizes) if placement.shards_gradients else 0
    weight_slots, gradient_slots = (min(NUM_STATE_SLOTS, count) for count in (in_weight_slots, in_gradient_slots))
    return StateBytes(
        weights=(units.rest(in_weight_slots).weights + ends.weights + weight_shards) * narrow
        + coded_bytes(sizes.quantize, units.rest(0).coded),
        gradients=(units.rest(in_gradient_slots).size + ends.size + gradient_shards) * wide,
        masters=masters,
        moments=_shard(here_numel, sizes) * sizes.moments,
        slots=units.layer_weights * narrow * weight_slots
        + layer.size * wide * gradient_slots
        + layer.coded * narrow
        + workspace_bytes(layer.largest_coded),
        staging=_staging_bytes(units, placement, sizes),
        host=_host_bytes(units, placement, sizes),
    )


def accumulates_whole(placement: StatePlacement, sizes: StateSizes) -> bool:
    """Whether gradients in slots are copied to host memory before they are reduced, for the next microbatch to add
    to.
    """
    return sizes.microbatches > 1 and not placement.shards_gradients


def rings_gradients(placement: StatePlacement, sizes: StateSizes) -> bool:
    """Whether all layers on the host take turns in two records of reduced gradients."""
    return placement.optimizer > 0 and not sizes.clips and sizes.microbatches == 1


def _staging_bytes(units: RankUnits, placement: StatePlacement, sizes: StateSizes) -> int:
    layer, from_host, driven, total = units.layer, placement.weights_from_host, placement.num_driven, 0
    if sizes.shards > 1 and driven:
        adds = placement.shards_gradients and placement.optimizer > 0 and sizes.microbatches > 1
        total += (min(NUM_STATE_SLOTS, driven) + adds) * _shard(layer.size, sizes) * sizes.wide
    if sizes.shards > 1 and from_host:
        total += min(NUM_STATE_SLOTS, placement.weights_in_slots) * _shard(units.layer_weights, sizes) * sizes.narrow
    if from_host and sizes.has_masters and not placement.weight_copy:
        total += _shard(layer.largest, sizes) * sizes.wide
    return total


def _host_bytes(units: RankUnits, placement: StatePlacement, sizes: StateSizes) -> int:
    layer, on_host = units.layer, placement.optimizer
    if not on_host:
        return 0
    shard = _shard(units.first(on_host).size, sizes)
    ring = min(on_host, NUM_STATE_SLOTS) * _shard(layer.size, sizes)
    total = shard * (sizes.wide + sizes.moments) + (ring if rings_gradients(placement, sizes) else shard) * sizes.wide
    if accumulates_whole(placement, sizes) and sizes.shards > 1:
        total += units.first(placement.gradients).size * sizes.wide
    streamed = units.first(placement.weights_from_host)
    total += _shard(streamed.frozen, sizes) * sizes.narrow
    if placement.weight_copy and sizes.has_masters:
        total += _shard(streamed.size, sizes) * sizes.narrow
    return_whole = [layer.largest] if on_host > placement.weights_from_host else []
    if placement.ends_on_host:
        total += (2 * sizes.wide + sizes.moments) * sum(_shard(end.size, sizes) for end in units.ends)
        return_whole += [end.largest for end in units.ends]
    if sizes.has_masters and return_whole:
        total += NUM_STATE_SLOTS * _shard(max(return_whole), sizes) * sizes.narrow
    return total


def _shard(elements: int, sizes: StateSizes) -> int:
    return -(-elements // sizes.shards)

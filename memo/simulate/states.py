"""Seconds of copies, gathers and CPU updates of one stage, if its states are not all whole on the device.

A layer has P elements. N = dp x cp; n and w are the bytes of an element of the model and of its sums. Frozen weights
take part in the first two lines only.

    link        data of one layer                                                when
    h2d         P n/N of weights (P w/N from the masters), into a slot           before it runs, if not in a slot
    dp          weights gathered to P n                                          then
    dp          P w of gradients reduced to P w/N                                after its last backward (or each)
    d2h         P w/N of gradients, or P w that a later microbatch adds to       then
    h2d         the same gradients, to be added to                               before its next backward
    CPU         AdamW on P/N                                                     when all gradients are clipped
    h2d, dp     P n/N of new weights, gathered, if the layer stays whole         then
"""

from dataclasses import dataclass
from functools import cached_property

from memo.config import RunConfig
from memo.estimate.state_memory import accumulates_whole, rings_gradients, state_sizes
from memo.simulate.kernels import Group, Kernels
from memo.simulate.state_traffic import StateTraffic, state_traffic
from memo.spec.moments import update_bytes
from memo.spec.parameters import layer_parameters, stage_parameters
from memo.spec.placement import StatePlacement, placement_of
from memo.spec.schedule import Pipeline, pipeline_of


@dataclass(frozen=True)
class StateTimes:
    """Times of one stage: seconds for one layer unless said otherwise, 0 on a link that is not needed.

    Attributes:
        traffic: how often layers are moved in one step.
        fill_s, gather_s: weights of a layer from host memory, and from all shards.
        scatter_s: reduction of a layer's gradients.
        whole_out_s, whole_in_s: main gradient to host memory and back, between microbatches (0: not needed).
        shard_out_s, shard_in_s: reduced gradients to host memory, and back to be added to.
        update_s, upload_s: AdamW on the CPU, and the new weights back to a layer that stays whole.
        ends_out_s, ends_update_s, ends_upload_s: reduced gradients, AdamW and new weights of embedding and head
            together; 0 if the device updates them.
        clips: whether all updates wait for the norm of all gradients.
        rings: whether two host records serve the reduced gradients of all layers in turn.
    """

    pipeline: Pipeline
    stage: int
    placement: StatePlacement
    fill_s: float
    gather_s: float
    scatter_s: float
    whole_out_s: float
    whole_in_s: float
    shard_out_s: float
    shard_in_s: float
    update_s: float
    upload_s: float
    ends_out_s: float
    ends_update_s: float
    ends_upload_s: float
    clips: bool
    rings: bool

    @property
    def cpu_s(self) -> float:
        """Seconds of the CPU in one step."""
        return self.placement.optimizer * self.update_s + self.ends_update_s

    @cached_property
    def traffic(self) -> StateTraffic:
        return state_traffic(self.pipeline, self.stage, self.placement)

    @property
    def num_reduced_apart(self) -> int:
        """Layers whose gradients data parallelism reduces bucket by bucket, as without streamed states."""
        return self.placement.layers - self.placement.num_driven

    @property
    def most_of_a_layer_s(self) -> tuple[float, float, float]:
        """The most seconds that the states of one layer take in a step if each state moves once: host to device,
        device to host, and over dp x cp."""
        return self.fill_s + self.whole_in_s, self.whole_out_s + self.shard_out_s, self.gather_s + self.scatter_s

    @property
    def h2d_s(self) -> float:
        """Seconds of copies to the device in one step."""
        count, at = self.traffic, self.placement
        whole = 0 if at.shards_weights else at.optimizer - at.weights
        again_s = count.sums_in * self.whole_in_s + count.shards_in * self.shard_in_s
        return count.fills * self.fill_s + again_s + whole * self.upload_s + self.ends_upload_s

    @property
    def d2h_s(self) -> float:
        """Seconds of copies to host memory in one step."""
        count = self.traffic
        return count.shards_out * self.shard_out_s + count.sums_out * self.whole_out_s + self.ends_out_s

    @property
    def last_d2h_s(self) -> float:
        """Seconds of copies to host memory in the backward of the last microbatch."""
        return self.placement.optimizer * self.shard_out_s + self.ends_out_s

    @property
    def dp_s(self) -> float:
        """Seconds in one step of gathers of weights into slots and of reductions of gradients, layer by layer."""
        return self.traffic.gathers * self.gather_s + self.traffic.reductions * self.scatter_s


def state_times(
    config: RunConfig, kernels: Kernels, world_size: int, stage: int, placement: StatePlacement | None = None
) -> StateTimes | None:
    """Return the times of a rank of `stage`; None if all its states are whole on the device.

    `placement`: default: that of the configuration."""
    placement = placement or placement_of(config, world_size)
    if not placement.streams:
        return None
    parallel, hardware, sizes = config.parallel, kernels.hardware, state_sizes(config, world_size)
    layer = layer_parameters(config.model, trained=True).of_rank(parallel.tp)
    frozen = layer_parameters(config.model).of_rank(parallel.tp) - layer
    of_stage = stage_parameters(config, stage) if placement.ends_on_host else 0
    ends = max(0, of_stage - placement.layers * layer)
    group = Group(parallel.dp(world_size) * parallel.cp, parallel.tp)
    shard, width = layer / sizes.shards, kernels.narrow if placement.weight_copy else kernels.wide
    h2d, d2h = hardware.prefetch_gb_per_s * 1e9, hardware.offload_gb_per_s * 1e9
    update_bytes_each = update_bytes(config.training, kernels.wide) + kernels.narrow
    update = update_bytes_each / hardware.host_bytes_per_s(hardware.local_ranks(world_size))
    whole_s = layer * kernels.wide if accumulates_whole(placement, sizes) else 0
    return StateTimes(
        pipeline=pipeline_of(config, world_size),
        stage=stage,
        placement=placement,
        fill_s=(shard * width + frozen / sizes.shards * kernels.narrow) / h2d,
        gather_s=kernels.gather_s((layer + frozen) * kernels.narrow, group),
        scatter_s=kernels.gather_s(layer * kernels.wide, group),
        whole_out_s=whole_s / d2h,
        whole_in_s=whole_s / h2d,
        shard_out_s=shard * kernels.wide / d2h,
        shard_in_s=shard * kernels.wide / h2d,
        update_s=shard * update,
        upload_s=shard * kernels.narrow / h2d,
        ends_out_s=ends / sizes.shards * kernels.wide / d2h,
        ends_update_s=ends / sizes.shards * update,
        ends_upload_s=ends / sizes.shards * kernels.narrow / h2d,
        clips=sizes.clips,
        rings=rings_gradients(placement, sizes),
    )

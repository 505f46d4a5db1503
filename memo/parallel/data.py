"""Data parallelism with sharded states (Rajbhandari et al., ZeRO, 2020).

The weights of a bucket lie in one flat buffer. Beside it lies a buffer of main gradients in fp32 (fp64 for fp64
weights), to which every microbatch adds. After the last microbatch, each rank of dp x cp receives the sum of its shard
by a reduce-scatter, which starts as soon as the bucket is complete. The rank then updates its shard of the fp32 master
weights, and all ranks gather the new weights: ZeRO-1.

Layers whose states are not resident on the device (memo.spec.placement) have no flat buffers there. `StateMover`
(memo.executor.states) gives them slots while they run, and copies their gradients to the memory that holds their
masters.

Gradients are summed without a factor, because the loss is already divided by the number of tokens of the global batch.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from memo.config.model import Quantization
from memo.mesh import Mesh
from memo.parallel.collectives import all_gather, group_rank, group_size
from memo.parallel.main_gradients import MainGradients
from memo.parallel.quantized import CodedBucket
from memo.parallel.shards import ShardedParameter, initialize
from memo.parallel.unit_plans import make_units, plan_units
from memo.parallel.units import Bucket, HostMemory, HostRules, MasterSegment, StateMover, Unit, nothing
from memo.spec.placement import StatePlacement
from memo_kernels import wide_dtype
from memo_kernels.squared_norm.reference import squared_norm


class ShardedDataParallel:
    """Owns the memory of a rank's parameters and gradients; `main_gradients` reduces the gradients over dp x cp.

    `model` must be built of `empty_parameter`s, which have no memory; they become views of the buffers here.

    Args:
        placement: where the states of each layer are stored; default: all on the device.
        host_memory: allocates an arena of a given number of bytes in host memory, for the states that `placement`
            puts there.
        accumulates: whether a step has several microbatches.
        consumes_gradients: whether the CPU updates a layer as soon as its gradient has arrived in host memory, so that
            two records are enough for the gradients of all layers.
        moments: dtypes of exp_avg and exp_avg_sq; default: the masters'.
        quantize: the format of quantized weights.
        saves_frozen: whether checkpoints contain frozen weights; needed if no other file holds them.
        squared_norm: the argument `norm` of MainGradients.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        *,
        dtype: torch.dtype,
        device: torch.device,
        bucket_size: int,
        overlap: bool,
        placement: StatePlacement | None = None,
        host_memory: Callable[[int], HostMemory] | None = None,
        accumulates: bool = False,
        consumes_gradients: bool = False,
        moments: tuple[torch.dtype, torch.dtype] | None = None,
        quantize: Quantization = "none",
        saves_frozen: bool = True,
        squared_norm: Callable[[Tensor], Tensor] = squared_norm,
    ) -> None:
        self.model, self.mesh, self.saves_frozen = model, mesh, saves_frozen
        self.group, self.device, self.dtype = mesh.dp_cp, device, dtype
        # Backward produces gradients from the last layer to the first.
        named: dict[str, ShardedParameter] = {}
        for name, parameter in reversed(list(model.named_parameters())):
            assert isinstance(parameter, ShardedParameter), f"{name} has no Shard"
            parameter.local_name = name
            named[name] = parameter
        plans = plan_units(named, bucket_size, group_size(self.group), placement)
        self.host_memory = host_memory
        is_sharded = placement is not None and placement.shards_gradients  # then every microbatch is reduced
        self.rules = HostRules(
            moments or (wide_dtype(dtype),) * 2,
            weight_copy=placement is None or placement.weight_copy,
            keeps_partial=accumulates and not is_sharded,
            consumes=consumes_gradients and not accumulates,
            quantize=quantize,
        )
        self.units, self.host = make_units(plans, self.rules, group_rank(self.group), dtype, device, host_memory)
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self.trained_buckets = [bucket for unit in self.units for bucket in unit.trained_buckets]
        self.layer_units = {unit.layer: unit for unit in self.units if unit.layer is not None}
        self._nothing = nothing(dtype, device)
        self.constants: list[MasterSegment] = []
        """Values that every rank has besides parameters; they have no gradient, and no optimizer updates them."""
        self.parameters = self._replaced(named)
        for unit in self.units:
            self.bind_weights(unit, None)
            self.bind_gradients(unit, None)
        trained = {name: each for name, each in self.parameters.items() if not each.shard.frozen}
        self.main_gradients = MainGradients(self.units, trained, mesh, device, overlap=overlap, norm=squared_norm)

    def initialize(self, seed: int, wanted: Callable[[ShardedParameter], bool] = lambda _: True) -> None:
        """Set the initial weights and their masters, which are the same for every layout and placement.

        Parameters that are not `wanted` may be zero afterwards.
        """
        for unit in self.units:
            with self.scratch(unit) as weights:
                for parameter in filter(wanted, self._parameters_of(unit)):
                    initialize(parameter, seed)
                for bucket, flat in zip(unit.buckets, weights, strict=True):
                    if bucket.has_own_master:
                        bucket.master.copy_(flat[bucket.mine])
                    bucket.refresh_source()
        self.encode(lambda parameter: initialize(parameter, seed))

    @torch.no_grad()
    def encode(self, fill: Callable[[ShardedParameter], None]) -> None:
        """Set the quantized weights, one bucket at a time: `fill` sets a parameter's fp32 values, which are zero."""
        for bucket in (each for unit in self.units for each in unit.coded):
            flat = torch.zeros(bucket.plan.size, dtype=torch.float32, device=self.device)
            self._bind(bucket, flat)
            for span in bucket.plan.ranges:
                fill(self.parameters[span.name])
            bucket.encode(flat)
            self._bind(bucket, None)

    def bind_coded(self, unit: Unit, flats: list[Tensor] | None) -> None:
        """Make a unit's quantized parameters views of these flat tensors, one for each bucket; None: they show NaN."""
        for index, bucket in enumerate(unit.coded):
            self._bind(bucket, None if flats is None else flats[index])

    def _bind(self, bucket: Bucket | CodedBucket, flat: Tensor | None) -> None:
        for span in bucket.plan.ranges:
            value = self._nothing.expand(span.shape) if flat is None else span.view(flat)
            self.parameters[span.name].data = value

    @contextlib.contextmanager
    def scratch(self, unit: Unit) -> Iterator[list[Tensor]]:
        """Give a unit temporary memory, filled with zeros, for the weights and gradients that it has only in slots.

        Yields the flat weights of each bucket, temporary or resident.
        """
        weights = [_resident_or_zeros(b.weights, b.plan.size, self.dtype, self.device) for b in unit.buckets]
        wide = wide_dtype(self.dtype)
        self.bind_weights(unit, weights)
        self.bind_coded(unit, [torch.zeros(b.plan.size, dtype=self.dtype, device=self.device) for b in unit.coded])
        self.bind_gradients(
            unit, [_resident_or_zeros(b.gradients, b.plan.size, wide, self.device) for b in unit.trained_buckets]
        )
        try:
            yield weights
        finally:
            self.bind_weights(unit, None)
            self.bind_coded(unit, None)
            self.bind_gradients(unit, None)

    def master_segments(self) -> list[MasterSegment]:
        """All master segments of this rank: trained ones, whose gradients are valid after reduction, frozen ones and
        constants."""
        return [*(segment for bucket in self.buckets for segment in self.segments_of(bucket)), *self.constants]

    def saved_unchanged(self) -> list[MasterSegment]:
        """The segments in checkpoints that no optimizer updates."""
        frozen = (bucket for bucket in self.buckets if bucket.plan.frozen and self.saves_frozen)
        return [*(segment for bucket in frozen for segment in self.segments_of(bucket)), *self.constants]

    def segments_of(self, bucket: Bucket) -> list[MasterSegment]:
        segments = []
        for segment in bucket.plan.segments(group_rank(self.group)):
            part = slice(segment.shard_offset, segment.shard_offset + segment.stop - segment.start)
            weight = nn.Parameter(bucket.master[part], requires_grad=not bucket.plan.frozen)
            weight.grad = None if bucket.plan.frozen else bucket.gradient_shard[part]
            moments = None if bucket.moments is None else (bucket.moments[0][part], bucket.moments[1][part])
            shard = self.parameters[segment.range.name].shard
            segments.append(MasterSegment(segment, shard, weight, moments))
        return segments

    def publish_weights(self, buckets: Sequence[Bucket] | None = None, mover: StateMover | None = None) -> None:
        """Cast the updated masters of these buckets (default: of all) to the weights' dtype, and gather over dp x cp.

        A caller that names buckets must have called their `refresh_source` before. `mover`: moves this rank's states if
        some of them are not resident on the device; before it exists, masters in host memory are copied without it.
        """
        for bucket in self.buckets if buckets is None else buckets:
            if buckets is None:
                bucket.refresh_source()
            if bucket.weights is not None:
                self._publish(bucket, bucket.weights, mover)

    def _publish(self, bucket: Bucket, weights: Tensor, mover: StateMover | None) -> None:
        shard = weights[bucket.mine]
        if bucket.has_own_master and bucket.places.optimizer_on_host and mover is not None:
            mover.upload_weights(bucket)
        elif bucket.has_own_master:
            shard.copy_(bucket.master)
        self.gather_weights(bucket)

    def gather_weights(self, bucket: Bucket) -> None:
        """Gather a bucket's resident weights over dp x cp."""
        assert bucket.weights is not None
        # Cloned, because the input and the output of a collective must not overlap.
        if group_size(self.group) > 1:
            all_gather(bucket.weights[bucket.mine].clone(), self.group, out=bucket.weights)

    def bind_weights(self, unit: Unit, flats: list[Tensor] | None) -> None:
        """Make a unit's parameters views of these flat tensors, one for each bucket.

        None: views of the resident weights; parameters without resident weights show NaN.
        """
        parts = [bucket.weights for bucket in unit.buckets] if flats is None else flats
        for bucket, part in zip(unit.buckets, parts, strict=True):
            self._bind(bucket, part)

    def bind_gradients(self, unit: Unit, flats: list[Tensor] | None) -> None:
        """Make a unit's main gradients views of these flat tensors, one for each trained bucket.

        None: views of the resident gradients; parameters without resident gradients have no main gradient.
        """
        parts = [bucket.gradients for bucket in unit.trained_buckets] if flats is None else flats
        for bucket, part in zip(unit.trained_buckets, parts, strict=True):
            for span in bucket.plan.ranges:
                self.parameters[span.name].main_grad = None if part is None else span.view(part)

    def _parameters_of(self, unit: Unit) -> list[ShardedParameter]:
        return [self.parameters[span.name] for bucket in unit.buckets for span in bucket.plan.ranges]

    def _replaced(self, named: dict[str, ShardedParameter]) -> dict[str, ShardedParameter]:
        """Replace the model's parameters by new ones, which are returned by name."""
        placed = {}
        plans = [b.plan for unit in self.units for b in unit.buckets]
        plans += [b.plan for unit in self.units for b in unit.coded]
        for plan in plans:
            for span in plan.ranges:
                unseen = self._nothing.expand(span.shape)
                placed[span.name] = ShardedParameter(unseen, named[span.name].shard, span.name)
        for module in self.model.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                assert isinstance(parameter, ShardedParameter)
                setattr(module, key, placed[parameter.local_name])
        return placed


def _resident_or_zeros(resident: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device) if resident is None else resident

"""Data parallelism with sharded states (Rajbhandari et al., ZeRO, 2020).

Weights live in flat buffers, one a bucket; beside each lies a buffer of gradients in fp32 (fp64 for fp64
weights) into which every microbatch adds. After the last microbatch each rank of dp x cp receives
the sum of its shard (reduce-scatter, started as soon as a bucket is complete), updates its shard of
the fp32 master weights, and all ranks gather the new weights: ZeRO-1.

Layers whose states are not resident on the device (memo.spec.placement) have no flat buffers: `StateMover`
(memo.executor.states) lends them slots while they run, and brings their gradients where their masters are.

Gradients add up without any factor: the loss is already divided by the tokens of the global batch.
"""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from memo.mesh import Mesh
from memo.parallel.collectives import add_up, all_gather, all_reduce, group_rank, group_size, reduce_scatter_async
from memo.parallel.shards import Shard, ShardedParameter, initialize
from memo.parallel.unit_plans import make_units, plan_units
from memo.parallel.units import Bucket, HostMemory, HostRules, Unit, nothing, wide_dtype
from memo.spec.buckets import Segment
from memo.spec.placement import StatePlacement
from memo_kernels.squared_norm.reference import squared_norm


@dataclass
class MasterSegment:
    """A part of one parameter in this rank's shard, as the optimizer sees it.

    Attributes:
        segment: which flat range of the local parameter it is.
        shard: the local parameter's description.
        weight: master values (a leaf whose .grad is the reduced gradient), 1-D.
        moments: where the first and second must lie, 1-D; None where the optimizer makes them.
    """

    segment: Segment
    shard: Shard
    weight: nn.Parameter
    moments: tuple[Tensor, Tensor] | None = None


class StateMover(Protocol):
    """Copies states between device and host beside the computation (memo.executor.states)."""

    def finish_gradients(self) -> None:
        """Every gradient of a driven unit has been reduced, and is on its way to its shard."""

    def offload_gradient(self, bucket: Bucket, reduced: Tensor) -> None:
        """Host gradient shard <- reduced gradient on the device."""

    def await_gradients(self) -> None:
        """Returns when the host may read gradients and write masters."""

    def upload_weights(self, bucket: Bucket) -> None:
        """Resident weights' shard <- masters on the host."""

    def forget(self) -> None:
        """Weights have changed."""


class ShardedDataParallel:
    """Owns the memory of a rank's parameters and gradients, and their reduction over dp x cp.

    `model` must be built of `empty_parameter`s (no memory); here they become views of the buffers.

    Args:
        placement: where each layer's states are; default: all on the device.
        host_memory: makes the host arena of a number of bytes, for what `placement` puts there.
        accumulates: whether a step has several microbatches.
        consumes_gradients: the CPU updates a layer as soon as its gradient has come, so that few are in host memory.
        squared_norm: the kernel for gradients on the device (memo_kernels); those in host memory had theirs there.
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
        squared_norm: Callable[[Tensor], Tensor] = squared_norm,
    ) -> None:
        self.model, self.mesh, self.overlap = model, mesh, overlap
        self.group, self.device, self.dtype = mesh.dp_cp, device, dtype
        self._squared_norm = squared_norm
        self.mover: StateMover | None = None
        # Gradients appear from the last layer to the first.
        named: dict[str, ShardedParameter] = {}
        for name, parameter in reversed(list(model.named_parameters())):
            assert isinstance(parameter, ShardedParameter), f"{name} has no Shard"
            named[name] = parameter
        plans = plan_units(named, bucket_size, group_size(self.group), placement)
        self.host_memory = host_memory
        is_sharded = placement is not None and placement.shards_gradients  # then each microbatch is reduced
        self.rules = HostRules(
            weight_copy=placement is None or placement.weight_copy,
            keeps_partial=accumulates and not is_sharded,
            consumes=consumes_gradients and not accumulates,
        )
        self.units, self.host = make_units(plans, self.rules, group_rank(self.group), dtype, device, host_memory)
        self.buckets = [bucket for unit in self.units for bucket in unit.buckets]
        self.layer_units = {unit.layer: unit for unit in self.units if unit.layer is not None}
        self._nothing = nothing(dtype, device)
        self.parameters = self._give_memory(named)
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._main_gradients: dict[int, Tensor] = {}
        for unit in self.units:
            self.bind_gradients(unit, None)
        self._missing: dict[str, int] = {}
        self._reduced_here = [b for unit in self.units if not unit.is_driven for b in unit.buckets]
        self._next_bucket = 0
        # Autograd holds hooks where the garbage collector cannot look: a strong one would keep model, gradients
        # and process groups for ever.
        accumulate = weakref.WeakMethod(self._accumulate)

        def on_gradient(parameter: Tensor) -> None:
            method = accumulate()
            assert method is not None, "a backward after its ShardedDataParallel is gone"
            method(parameter)

        for parameter in self.parameters.values():
            parameter.register_post_accumulate_grad_hook(on_gradient)

    def initialize(self, seed: int) -> None:
        """Initial weights, the same for every layout and placement; also the master copy."""
        for unit in self.units:
            with self.scratch(unit) as weights:
                for parameter in self._parameters_of(unit):
                    initialize(parameter, seed)
                for bucket, flat in zip(unit.buckets, weights, strict=True):
                    for copy in (bucket.master, bucket.source):
                        if copy is not None and copy.data_ptr() != flat[bucket.mine].data_ptr():
                            copy.copy_(flat[bucket.mine])

    @contextlib.contextmanager
    def scratch(self, unit: Unit) -> Iterator[list[Tensor]]:
        """Memory for the weights and gradients that a unit has only in slots: zeros, forgotten at the end.

        Yields the flat weights of each bucket, resident ones where they are.
        """
        weights = [_resident_or_zeros(b.weights, b.plan.size, self.dtype, self.device) for b in unit.buckets]
        wide = wide_dtype(self.dtype)
        self.bind_weights(unit, weights)
        self.bind_gradients(
            unit, [_resident_or_zeros(b.gradients, b.plan.size, wide, self.device) for b in unit.buckets]
        )
        try:
            yield weights
        finally:
            self.bind_weights(unit, None)
            self.bind_gradients(unit, None)

    def master_segments(self) -> list[MasterSegment]:
        """This rank's share of the optimizer's work; gradients are attached by `finish_reduction`."""
        return [segment for bucket in self.buckets for segment in self.segments_of(bucket)]

    def segments_of(self, bucket: Bucket) -> list[MasterSegment]:
        segments = []
        for segment in bucket.plan.segments(group_rank(self.group)):
            part = slice(segment.shard_offset, segment.shard_offset + segment.stop - segment.start)
            weight = nn.Parameter(bucket.master[part])
            weight.grad = bucket.gradient_shard[part]
            moments = None if bucket.moments is None else (bucket.moments[0][part], bucket.moments[1][part])
            shard = self.parameters[segment.slot.name].shard
            segments.append(MasterSegment(segment, shard, weight, moments))
        return segments

    def begin_step(self, num_microbatches: int, used_twice: nn.Parameter | None = None) -> None:
        """Zero the gradients and expect `num_microbatches` of them from every parameter.

        `used_twice`: one whose two uses in a microbatch give a gradient each, as they are not of one graph.
        """
        for bucket in self.buckets:
            if bucket.gradients is not None:
                bucket.gradients.zero_()
            bucket.pending = bucket.reduced = bucket.squared_norm = None
        self._missing = dict.fromkeys(self.parameters, num_microbatches)
        if used_twice is not None:
            self._missing[self._names[id(used_twice)]] *= 2
        self._next_bucket = 0

    def finish_reduction(self) -> None:
        """After the last backward: every shard holds the gradient of the whole global batch."""
        late = [name for name, missing in self._missing.items() if missing]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters got fewer gradients than microbatches, the first is {late[0]}: "
                "each must take part in every forward"
            )
        if self.mover is not None:
            self.mover.finish_gradients()
        for bucket in self._reduced_here[self._next_bucket :]:
            self._start_reduction(bucket)
        reduced = []
        for bucket in self._reduced_here:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None  # gloo's work holds a copy of all gradients
            assert bucket.gradients is not None
            shard = bucket.gradients[bucket.mine]
            if bucket.reduced is not None:
                shard.copy_(bucket.reduced)
                bucket.reduced = None
            reduced.append((bucket, shard))
        self.complete(reduced)
        for bucket, shard in reduced:
            if bucket.places.optimizer_on_host:
                assert self.mover is not None
                self.mover.offload_gradient(bucket, shard)

    def complete(self, reduced: Sequence[tuple[Bucket, Tensor]]) -> None:
        """Shards, reduced over dp x cp, become gradients of the whole global batch.

        Each tp rank has seen a part of the tokens: gradients of norms and late biases are summed over all, in one
        message a step. Those that leave the device are summed before they do, in one message a layer.
        """
        add_up([shard for bucket, shard in reduced if bucket.plan.replicated == "tp"], self.mesh.tp)
        for bucket, shard in reduced:
            if bucket.plan.replicated == "embedding":
                all_reduce(shard, self.mesh.embedding)
            if bucket.places.optimizer_on_host:
                bucket.squared_norm = self._squared_norm(shard)

    def gradient_norm(self) -> Tensor:
        """L2 norm over every weight of the model, each counted once; fp64 scalar, the same on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for bucket in self.buckets:
            if self._counts_here(bucket):
                told = bucket.squared_norm
                total += self._squared_norm(bucket.gradient_shard) if told is None else told
        for group in (self.group, self.mesh.tp, self.mesh.pp):
            all_reduce(total, group)
        return total.sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's gradient shards by a scalar of their dtype, which lies on the host wherever they are."""
        for bucket in self.buckets:
            bucket.gradient_shard.mul_(factor)

    def publish_weights(self, buckets: Sequence[Bucket] | None = None) -> None:
        """Weights from the updated master shards, of all buckets or these: cast, then gathered over dp x cp.

        Whoever names buckets has refreshed their sources.
        """
        for bucket in self.buckets if buckets is None else buckets:
            if buckets is None:
                bucket.refresh_source()
            if bucket.weights is not None:
                self._publish(bucket, bucket.weights)
        if self.mover is not None:
            self.mover.forget()

    def _publish(self, bucket: Bucket, weights: Tensor) -> None:
        shard = weights[bucket.mine]
        if bucket.places.optimizer_on_host and self.mover is not None:
            self.mover.upload_weights(bucket)
        elif bucket.has_own_master:
            shard.copy_(bucket.master)
        # A copy: input and output of a collective must not overlap.
        if group_size(self.group) > 1:
            all_gather(shard.clone(), self.group, out=weights)

    def bind_weights(self, unit: Unit, flats: list[Tensor] | None) -> None:
        """Parameters of a unit become views of these buckets; None: of the resident ones, or they show NaN."""
        parts = [bucket.weights for bucket in unit.buckets] if flats is None else flats
        for bucket, part in zip(unit.buckets, parts, strict=True):
            for slot in bucket.plan.slots:
                parameter = self.parameters[slot.name]
                if part is None:
                    parameter.data = self._nothing.expand(slot.shape)
                else:
                    parameter.data = bucket.view(slot, part)

    def bind_gradients(self, unit: Unit, flats: list[Tensor] | None) -> None:
        """Main gradients of a unit become views of these buckets; None: of the resident ones, or none at all."""
        parts = [bucket.gradients for bucket in unit.buckets] if flats is None else flats
        for bucket, part in zip(unit.buckets, parts, strict=True):
            for slot in bucket.plan.slots:
                key = id(self.parameters[slot.name])
                if part is None:
                    self._main_gradients.pop(key, None)
                else:
                    self._main_gradients[key] = bucket.view(slot, part)

    def _parameters_of(self, unit: Unit) -> list[ShardedParameter]:
        return [self.parameters[slot.name] for bucket in unit.buckets for slot in bucket.plan.slots]

    def _give_memory(self, named: dict[str, ShardedParameter]) -> dict[str, ShardedParameter]:
        placed = {}
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                view = self._nothing.expand(slot.shape)
                if bucket.weights is not None:
                    view = bucket.view(slot, bucket.weights)
                placed[slot.name] = ShardedParameter(view, named[slot.name].shard)
        by_identity = {id(parameter): placed[name] for name, parameter in named.items()}
        for module in self.model.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, by_identity[id(parameter)])
        return placed

    def main_gradient(self, parameter: nn.Parameter) -> Tensor:
        """The wide gradient of a parameter, in its shape, for code that adds to it directly."""
        return self._main_gradients[id(parameter)]

    def gradient_done(self, parameter: nn.Parameter) -> None:
        """One microbatch has been added to a parameter's main gradient."""
        name = self._names[id(parameter)]
        self._missing[name] -= 1
        if self.overlap and self._missing[name] == 0:
            self._start_ready_buckets()

    def _accumulate(self, parameter: Tensor) -> None:
        """Hook of autograd: move .grad into the main gradient."""
        assert parameter.grad is not None and isinstance(parameter, nn.Parameter)
        self.main_gradient(parameter).add_(parameter.grad)
        parameter.grad = None
        self.gradient_done(parameter)

    def _start_ready_buckets(self) -> None:
        """Start complete buckets in their fixed order: every rank must issue collectives alike."""
        while self._next_bucket < len(self._reduced_here):
            bucket = self._reduced_here[self._next_bucket]
            if any(self._missing[slot.name] for slot in bucket.plan.slots):
                return
            self._start_reduction(bucket)
            self._next_bucket += 1

    def _start_reduction(self, bucket: Bucket) -> None:
        if group_size(self.group) > 1:
            assert bucket.gradients is not None
            bucket.reduced, bucket.pending = reduce_scatter_async(bucket.gradients, self.group)

    def _counts_here(self, bucket: Bucket) -> bool:
        if bucket.plan.replicated == "tp":
            return self.mesh.at.tp == 0
        if bucket.plan.replicated == "embedding":
            return self.mesh.is_first_stage
        return True


def _resident_or_zeros(resident: Tensor | None, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.zeros(numel, dtype=dtype, device=device) if resident is None else resident

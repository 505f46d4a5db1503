"""Data parallelism with sharded optimizer states: ZeRO-1 (Rajbhandari et al., 2020).

Weights live in flat buffers, one a bucket; beside each lies a buffer of gradients in fp32 (fp64 for fp64
weights) into which every microbatch adds. After the last microbatch each rank of dp x cp receives
the sum of its shard (reduce-scatter, started as soon as a bucket is complete), updates its shard of
the fp32 master weights, and all ranks gather the new weights.

Gradients add up without any factor: the loss is already divided by the tokens of the global batch.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup, Work

from memo.mesh import Mesh
from memo.parallel.buckets import BucketPlan, Segment, plan_buckets
from memo.parallel.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter_async
from memo.parallel.shards import Shard, ShardedParameter, initialize


@dataclass
class MasterSegment:
    """A part of one parameter in this rank's shard, as the optimizer sees it.

    Attributes:
        segment: which flat range of the local parameter it is.
        shard: the local parameter's description.
        weight: master values (a leaf whose .grad is the reduced gradient), 1-D.
    """

    segment: Segment
    shard: Shard
    weight: nn.Parameter


class Bucket:
    """The memory of one bucket on one rank."""

    def __init__(self, plan: BucketPlan, rank: int, dtype: torch.dtype, device: torch.device) -> None:
        self.plan = plan
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        self.weights = torch.zeros(plan.size, dtype=dtype, device=device)
        self.gradients = torch.zeros(plan.size, dtype=wide, device=device)
        mine = slice(rank * plan.shard_size, (rank + 1) * plan.shard_size)
        self.weight_shard = self.weights[mine]
        self.gradient_shard = self.gradients[mine]
        # Weights that are as wide as their gradients are their own master copy.
        self.master = self.weight_shard if dtype == wide else torch.zeros_like(self.gradient_shard)
        self.pending: Work | None = None
        self.reduced: Tensor | None = None

    def view(self, name: str, flat: Tensor) -> Tensor:
        slot = next(slot for slot in self.plan.slots if slot.name == name)
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


class ShardedDataParallel:
    """Owns the memory of a rank's parameters and gradients, and their reduction over dp x cp.

    `model` must be built of `empty_parameter`s (no memory); here they become views of the buffers.
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
    ) -> None:
        self.model, self.mesh, self.overlap = model, mesh, overlap
        self.group = mesh.dp_cp
        rank, num_shards = group_rank(self.group), group_size(self.group)
        # Gradients appear from the last layer to the first.
        named: dict[str, ShardedParameter] = {}
        for name, parameter in reversed(list(model.named_parameters())):
            assert isinstance(parameter, ShardedParameter), f"{name} has no Shard"
            named[name] = parameter
        layout = [(name, tuple(p.shape), p.shard.replicated) for name, p in named.items()]
        plans = plan_buckets(layout, bucket_size, num_shards)
        self.buckets = [Bucket(plan, rank, dtype, device) for plan in plans]
        self.parameters = self._give_memory(named)
        places = {slot.name: bucket for bucket in self.buckets for slot in bucket.plan.slots}
        self._names = {id(parameter): name for name, parameter in self.parameters.items()}
        self._main_gradients = {
            id(parameter): places[name].view(name, places[name].gradients)
            for name, parameter in self.parameters.items()
        }
        self._missing: dict[str, int] = {}
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
        """Initial weights, the same for every layout; also the master copy."""
        for parameter in self.parameters.values():
            initialize(parameter, seed)
        self.masters_from_weights()

    def master_segments(self) -> list[MasterSegment]:
        """This rank's share of the optimizer's work; gradients are attached by `finish_reduction`."""
        rank = group_rank(self.group)
        segments = []
        for bucket in self.buckets:
            for segment in bucket.plan.segments(rank):
                part = slice(segment.shard_offset, segment.shard_offset + segment.stop - segment.start)
                weight = nn.Parameter(bucket.master[part])
                weight.grad = bucket.gradient_shard[part]
                segments.append(MasterSegment(segment, self.parameters[segment.slot.name].shard, weight))
        return segments

    def begin_step(self, num_microbatches: int) -> None:
        """Zero the gradients and expect `num_microbatches` of them from every parameter."""
        for bucket in self.buckets:
            bucket.gradients.zero_()
            bucket.pending = bucket.reduced = None
        self._missing = dict.fromkeys(self.parameters, num_microbatches)
        self._next_bucket = 0

    def finish_reduction(self) -> None:
        """After the last backward: every shard holds the gradient of the whole global batch."""
        late = [name for name, missing in self._missing.items() if missing]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters got fewer gradients than microbatches, the first is {late[0]}: "
                "each must take part in every forward"
            )
        for bucket in self.buckets[self._next_bucket :]:
            self._start_reduction(bucket)
        for bucket in self.buckets:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None  # gloo's work holds a copy of all gradients
            if bucket.reduced is not None:
                bucket.gradient_shard.copy_(bucket.reduced)
                bucket.reduced = None
            all_reduce(bucket.gradient_shard, self._replica_group(bucket))

    def gradient_norm(self) -> Tensor:
        """L2 norm over every weight of the model, each counted once; fp64 scalar, the same on all ranks."""
        device = self.buckets[0].gradients.device
        total = torch.zeros((), dtype=torch.float64, device=device)
        for bucket in self.buckets:
            if self._counts_here(bucket):
                total += torch.linalg.vector_norm(bucket.gradient_shard).double().square()
        for group in (self.group, self.mesh.tp, self.mesh.pp):
            all_reduce(total, group)
        return total.sqrt()

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply this rank's gradient shards by a scalar tensor."""
        for bucket in self.buckets:
            bucket.gradient_shard.mul_(factor.to(bucket.gradient_shard.dtype))

    def publish_weights(self) -> None:
        """Weights from the updated master shards: cast, then gather over dp x cp."""
        for bucket in self.buckets:
            if bucket.master is not bucket.weight_shard:
                bucket.weight_shard.copy_(bucket.master)
            # A copy: input and output of a collective must not overlap.
            if group_size(self.group) > 1:
                all_gather(bucket.weight_shard.clone(), self.group, out=bucket.weights)

    def masters_from_weights(self) -> None:
        for bucket in self.buckets:
            if bucket.master is not bucket.weight_shard:
                bucket.master.copy_(bucket.weight_shard)

    def _give_memory(self, named: dict[str, ShardedParameter]) -> dict[str, ShardedParameter]:
        placed = {}
        for bucket in self.buckets:
            for slot in bucket.plan.slots:
                view = bucket.view(slot.name, bucket.weights)
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
        while self._next_bucket < len(self.buckets):
            bucket = self.buckets[self._next_bucket]
            if any(self._missing[slot.name] for slot in bucket.plan.slots):
                return
            self._start_reduction(bucket)
            self._next_bucket += 1

    def _start_reduction(self, bucket: Bucket) -> None:
        if group_size(self.group) > 1:
            bucket.reduced, bucket.pending = reduce_scatter_async(bucket.gradients, self.group)

    def _replica_group(self, bucket: Bucket) -> ProcessGroup | None:
        groups = {"": None, "tp": self.mesh.tp, "embedding": self.mesh.embedding}
        return groups[bucket.plan.replicated]

    def _counts_here(self, bucket: Bucket) -> bool:
        if bucket.plan.replicated == "tp":
            return self.mesh.at.tp == 0
        if bucket.plan.replicated == "embedding":
            return self.mesh.is_first_stage
        return True

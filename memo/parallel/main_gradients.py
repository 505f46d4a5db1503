"""Sums each rank's main gradients, and reduces them over dp x cp (ZeRO; memo.parallel.data)."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from memo.mesh import Mesh
from memo.parallel.collectives import add_up, all_reduce, group_size, reduce_scatter_async
from memo.parallel.shards import ShardedParameter
from memo.parallel.units import Bucket, StateMover, Unit


class MainGradients:
    """Counts the contributions of backwards to each gradient, and reduces a bucket when all of its gradients are there.

    Args:
        parameters: the trained parameters, by name.
        overlap: whether reductions start during backwards, rather than all after the last backward.
        norm: the kernel (memo_kernels) for the sum of the squares of a gradient on the device. For gradients in host
            memory, `complete` calls it before they leave the device.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Mapping[str, ShardedParameter],
        mesh: Mesh,
        device: torch.device,
        *,
        overlap: bool,
        norm: Callable[[Tensor], Tensor],
    ) -> None:
        self._mesh, self._device, self._overlap, self._squared_norm = mesh, device, overlap, norm
        self._names = tuple(parameters)
        self._trained_buckets = [bucket for unit in units for bucket in unit.trained_buckets]
        self._missing: dict[str, int] = {}
        self._reduced_here = [bucket for unit in units if not unit.is_driven for bucket in unit.trained_buckets]
        self._next_bucket = 0
        # The garbage collector does not see the references that autograd's hooks hold. A hook with a strong reference
        # to this object would keep the model, its gradients and the process groups alive for ever.
        accumulate, added = _weakly(self._accumulate), _weakly(self.gradient_done)
        for parameter in parameters.values():
            parameter.register_post_accumulate_grad_hook(accumulate)
            parameter.on_added = added

    def begin_step(self, num_microbatches: int, used_twice: ShardedParameter | None = None) -> None:
        """Zero the main gradients, and expect `num_microbatches` contributions to the gradient of every parameter.

        `used_twice`: a parameter that contributes twice in a microbatch, because its two uses are in different graphs,
        or because backwards add the gradients of both themselves (memo.parallel.weight_gradients).
        """
        for bucket in self._trained_buckets:
            if bucket.gradients is not None:
                bucket.gradients.zero_()
            bucket.pending = bucket.reduced = bucket.squared_norm = None
        self._missing = dict.fromkeys(self._names, num_microbatches)
        if used_twice is not None and used_twice.local_name in self._missing:
            self._missing[used_twice.local_name] *= 2
        self._next_bucket = 0

    def finish_reduction(self, mover: StateMover | None = None) -> None:
        """Call it after the last backward; then every shard holds the gradient of the whole global batch.

        `mover`: moves this rank's states; needed if some of them are not resident on the device. Raises RuntimeError if
        a parameter got fewer gradients than there are microbatches.
        """
        late = [name for name, missing in self._missing.items() if missing]
        if late:
            raise RuntimeError(
                f"{len(late)} parameters got fewer gradients than microbatches, the first is {late[0]}: "
                "each must take part in every forward"
            )
        if mover is not None:
            mover.finish_gradients()
        for bucket in self._reduced_here[self._next_bucket :]:
            self._start_reduction(bucket)
        reduced = []
        for bucket in self._reduced_here:
            if bucket.pending is not None:
                bucket.pending.wait()
                bucket.pending = None  # gloo's work holds a copy of the whole bucket
            assert bucket.gradients is not None
            shard = bucket.gradients[bucket.mine]
            if bucket.reduced is not None:
                shard.copy_(bucket.reduced)
                bucket.reduced = None
            reduced.append((bucket, shard))
        self.complete(reduced)
        for bucket, shard in reduced:
            if bucket.places.optimizer_on_host:
                assert mover is not None, "states in host memory need their mover"
                mover.offload_gradient(bucket, shard)

    def complete(self, reduced: Sequence[tuple[Bucket, Tensor]]) -> None:
        """Turn shards that are reduced over dp x cp into gradients of the whole global batch.

        Each tp rank has seen only a part of the tokens, so the gradients of norms, and of biases that are added after
        the sum over tp, are summed over tp. One message sums all given shards. So each step sends one message for the
        gradients that stay on the device, and one for each layer whose gradient is offloaded.
        """
        add_up([shard for bucket, shard in reduced if bucket.plan.replicated == "tp"], self._mesh.tp)
        for bucket, shard in reduced:
            if bucket.plan.replicated == "embedding":
                all_reduce(shard, self._mesh.embedding)
            if bucket.places.optimizer_on_host:
                bucket.squared_norm = self._squared_norm(shard)

    def norm(self) -> Tensor:
        """L2 norm of the whole model's gradient, with every weight counted once; an fp64 scalar, equal on all ranks."""
        total = torch.zeros((), dtype=torch.float64, device=self._device)
        for bucket in self._trained_buckets:
            if self._counts_here(bucket):
                known = bucket.squared_norm
                total += self._squared_norm(bucket.gradient_shard) if known is None else known
        for group in (self._mesh.dp_cp, self._mesh.tp, self._mesh.pp):
            all_reduce(total, group)
        return total.sqrt()

    def main_gradient(self, parameter: nn.Parameter) -> Tensor | None:
        """Return the main gradient of a parameter, in its shape and in the wide dtype, for code that adds to it.

        Returns None for a frozen parameter.
        """
        assert isinstance(parameter, ShardedParameter)
        assert parameter.main_grad is not None or parameter.shard.frozen, "no memory for its gradient"
        return parameter.main_grad

    def gradient_done(self, parameter: nn.Parameter) -> None:
        """Call it once for each contribution that has been added to a parameter's main gradient; does nothing for a
        frozen parameter."""
        assert isinstance(parameter, ShardedParameter)
        if parameter.shard.frozen:
            return
        self._missing[parameter.local_name] -= 1
        if self._overlap and self._missing[parameter.local_name] == 0:
            self._start_ready_buckets()

    def _accumulate(self, parameter: Tensor) -> None:
        """Hook of autograd: add .grad to the main gradient, and free it."""
        assert isinstance(parameter, nn.Parameter)
        if parameter.grad is None:
            return  # a backward has added it itself, and called gradient_added (memo.parallel.weight_gradients)
        main = self.main_gradient(parameter)
        assert main is not None, "a frozen parameter has no gradient"
        main.add_(parameter.grad)
        parameter.grad = None
        self.gradient_done(parameter)

    def _start_ready_buckets(self) -> None:
        """Start the reductions of complete buckets in a fixed order: all ranks must issue the same collectives."""
        while self._next_bucket < len(self._reduced_here):
            bucket = self._reduced_here[self._next_bucket]
            if any(self._missing[span.name] for span in bucket.plan.ranges):
                return
            self._start_reduction(bucket)
            self._next_bucket += 1

    def _start_reduction(self, bucket: Bucket) -> None:
        if group_size(self._mesh.dp_cp) > 1:
            assert bucket.gradients is not None
            bucket.reduced, bucket.pending = reduce_scatter_async(bucket.gradients, self._mesh.dp_cp)

    def _counts_here(self, bucket: Bucket) -> bool:
        if bucket.plan.replicated == "tp":
            return self._mesh.at.tp == 0
        if bucket.plan.replicated == "embedding":
            return self._mesh.is_first_stage
        return True


def _weakly(method: Callable[[Any], None]) -> Callable[[Any], None]:
    """The method, without a strong reference to its object."""
    weak = weakref.WeakMethod(method)

    def call(parameter: Tensor) -> None:
        strong = weak()
        assert strong is not None, "a backward after its MainGradients is gone"
        strong(parameter)

    return call

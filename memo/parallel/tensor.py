"""Tensor parallelism with Megatron's sequence parallelism.

Between matrices every tp rank holds s/tp of the tokens; a column-parallel matrix gathers them, the
row-parallel matrix after it sums the partial results and scatters the tokens again. Source:
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

Shapes: s = tokens of this context-parallel rank, n = s / tp, b = micro-batch, h = hidden size.
With a group of None (tp = 1) n = s and nothing is communicated.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.adapter import Adapter
from memo.parallel.collectives import (
    all_gather,
    all_gather_async,
    reduce_scatter,
    reduce_scatter_async,
)
from memo.parallel.weight_gradients import gradient_added, weight_gradient


class _ColumnParallel(torch.autograd.Function):
    """y [s, b, out/tp] = gather(x [n, b, h]) W^T + bias.

    Only the sharded x is saved. Backward gathers it again while it computes the gradient of the input, and
    reduce-scatters that gradient while it computes the gradient of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # Activation checkpointing may return a copy of a saved tensor; a copy has no main gradient.
        ctx.owner, ctx.group, ctx.has_bias = weight, group, bias is not None
        return F.linear(all_gather(x, group), weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad_out,) = grads
        x, weight = ctx.saved_tensors
        gathered, gather = all_gather_async(x, ctx.group)
        grad_gathered = grad_out @ weight
        if gather is not None:
            gather.wait()
        grad_x, scatter = reduce_scatter_async(grad_gathered, ctx.group)
        is_trained = ctx.needs_input_grad[1]
        grad_weight = weight_gradient(ctx.owner, grad_out, gathered) if is_trained else None
        grad_bias = grad_out.flatten(0, -2).sum(0) if ctx.has_bias else None
        if scatter is not None:
            scatter.wait()
        if grad_weight is None and is_trained:
            gradient_added(ctx.owner)
        return grad_x, grad_weight, grad_bias, None


class _RowParallel(torch.autograd.Function):
    """y [n, b, h] = reduce_scatter(x [s, b, in/tp] W^T)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.owner, ctx.group = weight, group
        return reduce_scatter(F.linear(x, weight), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_out = all_gather(grads[0], ctx.group)
        grad_x = grad_out @ weight
        is_trained = ctx.needs_input_grad[1]
        grad_weight = weight_gradient(ctx.owner, grad_out, x) if is_trained else None
        if grad_weight is None and is_trained:
            gradient_added(ctx.owner)
        return grad_x, grad_weight, None


class _ParallelLinear(nn.Module):
    """A matrix, its bias and its LoRA adapter. Only custom layers, which have no adapters, call `forward`; memo's own
    layers run by memo.executor.pieces."""

    adapter: Adapter | None

    def __init__(
        self,
        weight: nn.Parameter,
        bias: nn.Parameter | None,
        group: ProcessGroup | None,
        adapter: Adapter | None = None,
    ) -> None:
        super().__init__()
        self.weight, self.bias, self.group, self.adapter = weight, bias, group, adapter


class ColumnParallelLinear(_ParallelLinear):
    """One matrix, or several fused matrices with a common input; each is split by its rows (outputs).

    Input [n, b, in], output [s, b, out/tp].
    """

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ColumnParallel.apply(x, self.weight, self.bias, self.group)
        return y


class RowParallelLinear(_ParallelLinear):
    """A matrix split by its columns (inputs).

    Its bias is the same on all ranks, and is added to this rank's tokens after the sum over the ranks.

    Input [s, b, in/tp], output [n, b, out].
    """

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RowParallel.apply(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias

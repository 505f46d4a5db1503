"""Tensor parallelism with Megatron's sequence parallelism.

Between matrices every tp rank holds s/tp of the tokens; a column-parallel matrix gathers them, the
row-parallel matrix after it sums the partial results and scatters the tokens again. Source:
Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022.

Shapes: s = tokens of this context-parallel rank, n = s / tp, b = micro-batch, h = hidden size.
With a group of None (tp = 1) n = s and nothing is communicated.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import (
    all_gather,
    all_gather_async,
    group_rank,
    group_size,
    reduce_scatter,
    reduce_scatter_async,
)

_EMBEDDING_CHUNK = 8192
"""Number of tokens whose unsharded embeddings exist at one time."""


def weight_gradient(grad_out: Tensor, x: Tensor) -> Tensor:
    """dW [out, in] of y = x W^T, summed over all leading dims."""
    return grad_out.flatten(0, -2).t() @ x.flatten(0, -2)


class _ColumnParallel(torch.autograd.Function):
    """y [s, b, out/tp] = gather(x [n, b, h]) W^T + bias.

    Only the sharded x is saved. Backward gathers it again while it computes the gradient of the input, and
    reduce-scatters that gradient while it computes the gradient of the weight.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.has_bias = group, bias is not None
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
        grad_weight = weight_gradient(grad_out, gathered)
        grad_bias = grad_out.flatten(0, -2).sum(0) if ctx.has_bias else None
        if scatter is not None:
            scatter.wait()
        return grad_x, grad_weight, grad_bias, None


class _RowParallel(torch.autograd.Function):
    """y [n, b, h] = reduce_scatter(x [s, b, in/tp] W^T)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.group = group
        return reduce_scatter(F.linear(x, weight), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_out = all_gather(grads[0], ctx.group)
        return grad_out @ weight, weight_gradient(grad_out, x), None


class _VocabParallelEmbedding(torch.autograd.Function):
    """y [n, b, h] = reduce_scatter(rows of the table for tokens [s, b], 0 where another rank has the row).

    Works on one chunk of tokens at a time: the unsharded embeddings of all s tokens would be tp times as large as the
    output, and so the largest tensor of a step on long sequences.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, tokens: Tensor, first_row: int, group: ProcessGroup | None) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.first_row, ctx.group, ctx.table = first_row, group, (weight.shape[0], weight.dtype)
        y = weight.new_empty((tokens.shape[0] // group_size(group), tokens.shape[1], weight.shape[1]))
        for chunk, rows, foreign in _embedding_chunks(tokens, first_row, weight.shape[0], group):
            x = F.embedding(rows, weight).masked_fill_(foreign.unsqueeze(-1), 0.0)
            reduce_scatter(x, group, out=y[chunk])
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        num_rows, dtype = ctx.table
        grad = grads[0].contiguous()
        wide = torch.float64 if dtype == torch.float64 else torch.float32  # sums over chunks are not in bf16
        grad_weight = torch.zeros(num_rows, grad.shape[-1], dtype=wide, device=grad.device)
        for chunk, rows, foreign in _embedding_chunks(tokens, ctx.first_row, num_rows, ctx.group):
            gathered = all_gather(grad[chunk], ctx.group).masked_fill_(foreign.unsqueeze(-1), 0.0)
            # Deterministic, unlike index_add on CUDA.
            grad_weight += torch.ops.aten.embedding_dense_backward(gathered, rows, num_rows, -1, False)
        return grad_weight.to(dtype), None, None, None


def _embedding_chunks(
    tokens: Tensor, first_row: int, num_rows: int, group: ProcessGroup | None
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each chunk: the range of this rank's tokens, the [c, b] rows of the table for these tokens of all ranks, and
    a mask of the rows that another rank holds."""
    by_rank = tokens.unflatten(0, (group_size(group), -1))
    step = max(1, _EMBEDDING_CHUNK // (group_size(group) * tokens.shape[1]))
    for start in range(0, by_rank.shape[1], step):
        chunk = slice(start, min(start + step, by_rank.shape[1]))
        rows = by_rank[:, chunk].flatten(0, 1) - first_row
        foreign = (rows < 0) | (rows >= num_rows)
        yield chunk, rows.masked_fill_(foreign, 0), foreign


class ColumnParallelLinear(nn.Module):
    """One matrix, or several fused ones with a common input; each of them is split by its rows, the outputs.

    Input [n, b, in], output [s, b, out/tp].
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _ColumnParallel.apply(x, self.weight, self.bias, self.group)
        return y


class RowParallelLinear(nn.Module):
    """A matrix split by its columns, the inputs.

    Its bias is the same on all ranks, and is added to this rank's tokens after the sum over the ranks.

    Input [s, b, in/tp], output [n, b, out].
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.bias, self.group = weight, bias, group

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _RowParallel.apply(x, self.weight, self.group)
        return y if self.bias is None else y + self.bias


class VocabParallelEmbedding(nn.Module):
    """A table split by the rows of the vocabulary, padded so that every rank has the same number of rows.

    Padding rows are not part of the model: they stay zero, and the loss leaves them out, so the model does not depend
    on tp. Input tokens [s, b], output [n, b, h].
    """

    def __init__(self, weight: nn.Parameter, group: ProcessGroup | None) -> None:
        super().__init__()
        self.weight, self.group = weight, group
        self.first_row = group_rank(group) * weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        if group_size(self.group) == 1:
            return F.embedding(tokens, self.weight)
        y: Tensor = _VocabParallelEmbedding.apply(self.weight, tokens, self.first_row, self.group)
        return y

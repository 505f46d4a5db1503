"""RMSNorm over a width that tensor parallelism splits, such as the width of all heads of a token together.

    y = x / sqrt(sum of x^2 over the parts of all ranks / width + epsilon) * weight

Each rank sums the squares of its part, and one all-reduce adds these sums for all norms of a call: one number for each
token and norm. Backward needs one more all-reduce of the same size.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_reduce, group_size
from memo_kernels import wide_dtype


def split_norms(
    x: Sequence[Tensor], weights: Sequence[Tensor], epsilon: float, group: ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Return the norm of each x [..., w] with its weight [w]; w is this rank's part of the width.

    All inputs have the same tokens. Statistics of narrow inputs are in fp32.
    """
    made: tuple[Tensor, ...] = _SplitNorms.apply(epsilon, group, *x, *weights)
    return made


class _SplitNorms(torch.autograd.Function):
    """Forward runs on all tokens at once, so it must not make a wide copy of them on GPUs; backward runs on tiles."""

    @staticmethod
    def forward(ctx: Any, epsilon: float, group: ProcessGroup | None, *inputs: Tensor) -> tuple[Tensor, ...]:
        count = len(inputs) // 2
        x, weights = inputs[:count], inputs[count:]
        wide = wide_dtype(x[0].dtype)
        squares = torch.stack([torch.linalg.vector_norm(each, dim=-1, dtype=wide).square() for each in x])
        all_reduce(squares, group)
        ctx.group, ctx.widths = group, [group_size(group) * each.shape[-1] for each in x]
        scales = [
            (total / width + epsilon).rsqrt().unsqueeze(-1) for total, width in zip(squares, ctx.widths, strict=True)
        ]
        ctx.save_for_backward(*x, *weights, *scales)
        made = (torch.mul(each, scale, out=each.new_empty(each.shape)) for each, scale in zip(x, scales, strict=True))
        return tuple(each.mul_(weight) for each, weight in zip(made, weights, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        count = len(grads)
        x, weights, scales = (ctx.saved_tensors[i * count : (i + 1) * count] for i in range(3))
        wide = scales[0].dtype
        normal = [each * scale for each, scale in zip(x, scales, strict=True)]
        grad_weights = [(grad * each).flatten(0, -2).sum(0) for grad, each in zip(grads, normal, strict=True)]
        weighted = [grad * weight.to(wide) for grad, weight in zip(grads, weights, strict=True)]
        along = torch.stack([(one * other).sum(-1) for one, other in zip(weighted, normal, strict=True)])
        along = all_reduce(along, ctx.group).unsqueeze(-1)
        grad_x = [
            ((weighted[i] - normal[i] * (along[i] / ctx.widths[i])) * scales[i]).to(x[i].dtype) for i in range(count)
        ]
        return None, None, *grad_x, *(grad.to(weight.dtype) for grad, weight in zip(grad_weights, weights, strict=True))

"""Norms as Triton kernels: a program takes one long row, or several short ones (heads) at a time.

Only the input is kept for backward, which recomputes the statistics, because it reads the rows anyway. Gradients of
weight and bias are summed in fp32, program by program in a fixed order, so every run on one device gives the same bits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memo_kernels.launch import as_rows, num_programs, num_warps

MAX_SIZE = 65536
"""Maximum number of columns in a row, which one program holds."""


_ELEMENTS = 2048
"""Elements of short rows that a program takes at a time."""


@triton.jit
def _statistics(x, inside, size, epsilon, CENTERED: tl.constexpr):
    """Mean (0 for RMSNorm) and reciprocal standard deviation of each row."""
    mean = 0.0
    if CENTERED:
        mean = (tl.sum(x, 1) / size)[:, None]
    deviation = tl.where(inside, x - mean, 0.0)
    return mean, (1.0 / tl.sqrt(tl.sum(deviation * deviation, 1) / size + epsilon))[:, None]


@triton.jit
def _forward(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, total_ptr, out_ptr,
    x_stride, residual_stride, num_rows, size, epsilon,
    CENTERED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS))[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (columns < size)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        x = x.to(tl.float32) + tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(
            tl.float32
        )
        x = x.to(total_ptr.dtype.element_ty)  # the norm is of the rounded sum, which is the one returned
        tl.store(total_ptr + row * size + columns, x, mask=inside)
    x = x.to(tl.float32)
    mean, scale = _statistics(x, inside, size, epsilon, CENTERED)
    y = (x - mean) * scale * tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    if CENTERED:
        y += tl.load(bias_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, x_ptr, weight_ptr, grad_total_ptr, grad_x_ptr, weight_sums_ptr, bias_sums_ptr,
    grad_stride, x_stride, grad_total_stride, num_rows, size, epsilon,
    CENTERED: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(weight_ptr + columns, mask=columns < size, other=0.0).to(tl.float32)
    weight_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    bias_sum = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(program * ROWS, num_rows, tl.num_programs(0) * ROWS):
        row = (first + tl.arange(0, ROWS))[:, None]
        inside = (row < num_rows) & (columns < size)
        x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
        mean, scale = _statistics(x, inside, size, epsilon, CENTERED)
        normal = tl.where(inside, (x - mean) * scale, 0.0)
        weight_sum += grad * normal
        weighted = grad * weight
        along = (tl.sum(weighted * normal, 1) / size)[:, None]
        grad_x = weighted - normal * along
        if CENTERED:
            bias_sum += grad
            grad_x -= (tl.sum(weighted, 1) / size)[:, None]
        grad_x *= scale
        if ADD:
            grad_x += tl.load(grad_total_ptr + row * grad_total_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_x_ptr + row * size + columns, grad_x.to(grad_x_ptr.dtype.element_ty), mask=inside)
    column = tl.arange(0, BLOCK)
    tl.store(weight_sums_ptr + program * size + column, tl.sum(weight_sum, 0), mask=column < size)
    if CENTERED:
        tl.store(bias_sums_ptr + program * size + column, tl.sum(bias_sum, 0), mask=column < size)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """Compute reference.norm for fp32, bf16 or fp16."""
    out: Tensor = _Norm.apply(x, weight, bias, epsilon)
    return out


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Compute reference.add_norm in one pass over x and residual."""
    total, out = _AddNorm.apply(x, residual, weight, bias, epsilon)
    return total, out


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.epsilon, ctx.centered = epsilon, bias is not None
        return _launch_forward(x, None, weight, bias, epsilon)[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*_launch_backward(grads[0], x, weight, None, ctx.epsilon, ctx.centered), None)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        total, out = _launch_forward(x, residual, weight, bias, epsilon)
        ctx.save_for_backward(total, weight)
        ctx.epsilon, ctx.centered = epsilon, bias is not None
        return total, out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        total, weight = ctx.saved_tensors
        grad_total, grad_out = grads
        grad, *of_parameters = _launch_backward(grad_out, total, weight, grad_total, ctx.epsilon, ctx.centered)
        return (grad, grad, *of_parameters, None)


def _launch_forward(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return (sum, norm); without a residual the sum is x itself."""
    rows, size = as_rows(x), x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    others = rows if residual is None else as_rows(residual)
    block, count = _blocks(size)
    _forward[(triton.cdiv(rows.shape[0], count),)](
        rows, others, weight, weight if bias is None else bias, total, out,
        rows.stride(0), others.stride(0), rows.shape[0], size, epsilon,
        CENTERED=bias is not None, ADD=residual is not None, ROWS=count, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    return total, out


def _launch_backward(
    grad: Tensor, x: Tensor, weight: Tensor, grad_total: Tensor | None, epsilon: float, centered: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the gradients of input, weight and bias."""
    rows, grads, size = as_rows(x), as_rows(grad), x.shape[-1]
    totals = grads if grad_total is None else as_rows(grad_total)
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block, count = _blocks(size)
    programs = num_programs(triton.cdiv(rows.shape[0], count), x.device)
    sums = torch.empty((2 if centered else 1, programs, size), dtype=torch.float32, device=x.device)
    _backward[(programs,)](
        grads, rows, weight, totals, grad_x, sums[0], sums[-1],
        grads.stride(0), rows.stride(0), totals.stride(0), rows.shape[0], size, epsilon,
        CENTERED=centered, ADD=grad_total is not None, ROWS=count, BLOCK=block, num_warps=num_warps(block),
    )  # fmt: skip
    of_weight, *of_bias = sums.sum(1).to(weight.dtype)
    return grad_x, of_weight, of_bias[0] if centered else None


def _blocks(size: int) -> tuple[int, int]:
    """Return the columns of a program, and the rows that it takes at a time."""
    if size > MAX_SIZE:
        raise ValueError(f"a norm over {size} columns: the kernel takes at most {MAX_SIZE}; use the torch kernels")
    block = triton.next_power_of_2(size)
    return block, max(1, _ELEMENTS // block)

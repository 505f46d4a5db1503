"""Activations as Triton kernels: one pass in forward and one in backward, which keeps only the input."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from memo_kernels.launch import as_rows

_BLOCK = 1024


@triton.jit
def _gelu(x, TANH: tl.constexpr):
    """Value and derivative of GELU (Hendrycks and Gimpel, 2016), exact or with their tanh."""
    if TANH:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        tanh = 1.0 - 2.0 / (tl.exp(2.0 * inner) + 1.0)
        slope = 0.7978845608028654 * (1.0 + 0.134145 * x * x)
        return 0.5 * x * (1.0 + tanh), 0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * slope
    cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)


@triton.jit
def _forward(
    x_ptr, out_ptr, x_stride, size, GATED: tl.constexpr, CLAMPED: tl.constexpr, TANH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + row * x_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            gate = tl.minimum(x, 7.0)
            y = gate * tl.sigmoid(1.702 * gate) * (tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0)
        elif TANH:
            y, _ = _gelu(x, TANH)
            y *= up
        else:
            y = x * tl.sigmoid(x) * up
    else:
        y, _ = _gelu(x, TANH)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    grad_ptr, x_ptr, grad_x_ptr, grad_stride, x_stride, grad_x_stride, size,
    GATED: tl.constexpr, CLAMPED: tl.constexpr, TANH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    grad = tl.load(grad_ptr + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    to = grad_x_ptr + row * grad_x_stride + columns
    if GATED:
        up = tl.load(x_ptr + row * x_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
        if CLAMPED:
            gate, inner = tl.minimum(x, 7.0), tl.abs(up) <= 7.0
            share = tl.sigmoid(1.702 * gate)
            of_up = tl.where(inner, grad * gate * share, 0.0)
            factor = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
            slope = tl.where(x <= 7.0, share * (1.0 + 1.702 * gate * (1.0 - share)) * factor, 0.0)
        elif TANH:
            y, slope = _gelu(x, TANH)
            of_up = grad * y
            slope *= up
        else:
            share = tl.sigmoid(x)
            of_up = grad * x * share
            slope = share * (1.0 + x * (1.0 - share)) * up
        tl.store(to + size, of_up.to(grad_x_ptr.dtype.element_ty), mask=inside)
    else:
        _, slope = _gelu(x, TANH)
    tl.store(to, (grad * slope).to(grad_x_ptr.dtype.element_ty), mask=inside)


def activate(inner: Tensor, kind: str) -> Tensor:
    """Compute reference.activate for fp32, bf16 or fp16; arithmetic is in fp32."""
    out: Tensor = _Activate.apply(inner, kind)
    return out


class _Activate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, kind: str) -> Tensor:
        ctx.save_for_backward(inner)
        ctx.kind = kind
        rows, size = as_rows(inner), _out_size(inner, kind)
        out = torch.empty((*inner.shape[:-1], size), dtype=inner.dtype, device=inner.device)
        _forward[_grid(rows, size)](rows, out, rows.stride(0), size, **_constants(kind))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inner,) = ctx.saved_tensors
        rows, grad, size = as_rows(inner), as_rows(grads[0]), _out_size(inner, ctx.kind)
        grad_inner = torch.empty(inner.shape, dtype=inner.dtype, device=inner.device)
        to = as_rows(grad_inner)
        _backward[_grid(rows, size)](
            grad, rows, to, grad.stride(0), rows.stride(0), to.stride(0), size, **_constants(ctx.kind)
        )
        return grad_inner, None


def _out_size(inner: Tensor, kind: str) -> int:
    return inner.shape[-1] // 2 if _is_gated(kind) else inner.shape[-1]


def _is_gated(kind: str) -> bool:
    return kind in ("swiglu", "swiglu_clamped", "geglu_tanh")


def _grid(rows: Tensor, size: int) -> tuple[int, int]:
    return rows.shape[0], triton.cdiv(size, _BLOCK)


def _constants(kind: str) -> dict[str, Any]:
    tanh = kind in ("gelu_tanh", "geglu_tanh")
    return {"GATED": _is_gated(kind), "CLAMPED": kind == "swiglu_clamped", "TANH": tanh, "BLOCK": _BLOCK}

"""Rotation as a Triton kernel: a program rotates all heads of one token, and reads the token's angles once.

The gradient of a rotation is the opposite rotation, so only the angles are kept.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotate(
    x_ptr, out_ptr, cos_ptr, sin_ptr, x_s, x_b, x_h, out_s, out_b, out_h, angle_s, angle_b, batch, heads, half,
    BACK: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    s, b = token // batch, token % batch
    columns = tl.arange(0, HALF)
    angles = s * angle_s + b * angle_b + columns
    inside = columns < half
    cos = tl.load(cos_ptr + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin = tl.load(sin_ptr + angles, mask=inside, other=0.0).to(tl.float32)[None, :]
    if BACK:
        sin = -sin
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS)).to(tl.int64)[:, None]
    mask = (head < heads) & inside[None, :]
    low = x_ptr + s * x_s + b * x_b + head * x_h + columns[None, :]
    a = tl.load(low, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(low + half, mask=mask, other=0.0).to(tl.float32)
    to = out_ptr + s * out_s + b * out_b + head * out_h + columns[None, :]
    tl.store(to, (a * cos - c * sin).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to + half, (c * cos + a * sin).to(out_ptr.dtype.element_ty), mask=mask)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Compute reference.rotate for fp32, bf16 or fp16; products and sums are in fp32."""
    out: Tensor = _Rotate.apply(x, cos, sin)
    return out


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Compute reference.rotate_ for fp32, bf16 or fp16. Raises ValueError unless heads are contiguous."""
    if x.stride(-1) != 1:
        raise ValueError(f"the elements of a head lie {x.stride(-1)} apart: in place only contiguous heads are turned")
    _launch(x, x, cos, sin, back=back)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _launch(x, torch.empty(x.shape, dtype=x.dtype, device=x.device), cos, sin, back=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad = grads[0]
        out = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        return _launch(grad, out, *ctx.saved_tensors, back=True), None, None


def _launch(x: Tensor, out: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> Tensor:
    if x.stride(-1) != 1:
        x = x.contiguous()
    s, b, heads, size = x.shape
    cos, sin = (angle.expand(s, b, 1, size // 2) for angle in (cos.contiguous(), sin.contiguous()))
    block = min(triton.next_power_of_2(heads), 16)
    _rotate[(s * b, triton.cdiv(heads, block))](
        x, out, cos, sin, *x.stride()[:3], *out.stride()[:3], cos.stride(0), cos.stride(1), b, heads, size // 2,
        BACK=back, HEADS=block, HALF=triton.next_power_of_2(size // 2),
    )  # fmt: skip
    return out

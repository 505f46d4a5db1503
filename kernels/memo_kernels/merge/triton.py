"""Merging as a Triton kernel: one pass instead of five; strides are free, but each head must be contiguous."""

import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 16


@triton.jit
def _merge(
    total_ptr, total_lse_ptr, out_ptr, lse_ptr,
    total_b, total_n, total_s, total_lse_b, total_lse_n, total_lse_s, out_b, out_n, out_s, lse_b, lse_n, lse_s,
    heads, length, size, TOKENS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    sequence = tl.program_id(1).to(tl.int64)
    b, n = sequence // heads, sequence % heads
    s = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    inside = s < length
    at = total_lse_ptr + b * total_lse_b + n * total_lse_n + s * total_lse_s
    old = tl.load(at, mask=inside, other=0.0)
    new = tl.load(lse_ptr + b * lse_b + n * lse_n + s * lse_s, mask=inside, other=0.0)
    highest = tl.maximum(old, new)  # of -inf and a number: nothing was merged before
    merged = highest + tl.log(tl.exp(old - highest) + tl.exp(new - highest))
    tl.store(at, merged, mask=inside)
    columns = tl.arange(0, SIZE)
    mask = inside[:, None] & (columns < size)[None, :]
    to = total_ptr + b * total_b + n * total_n + s[:, None] * total_s + columns[None, :]
    part = tl.load(out_ptr + b * out_b + n * out_n + s[:, None] * out_s + columns[None, :], mask=mask, other=0.0)
    total = tl.load(to, mask=mask, other=0.0) * tl.exp(old - merged)[:, None]
    tl.store(to, total + part.to(tl.float32) * tl.exp(new - merged)[:, None], mask=mask)


def merge_(total_out: Tensor, total_lse: Tensor, out: Tensor, lse: Tensor) -> None:
    """Compute reference.merge_ with running values in fp32."""
    if out.stride(-1) != 1:
        out = out.contiguous()
    b, n, s, size = out.shape
    # Tokens are the first axis of the grid: along the second, CUDA takes only 65,535 programs, which are 1M tokens.
    _merge[(triton.cdiv(s, _TOKENS), b * n)](
        total_out, total_lse, out, lse,
        *total_out.stride()[:3], *total_lse.stride(), *out.stride()[:3], *lse.stride(), n, s, size,
        TOKENS=_TOKENS, SIZE=triton.next_power_of_2(size),
    )  # fmt: skip

"""Sum of squares as a Triton kernel: fp64 within a block and between blocks, in a fixed order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192


@triton.jit
def _partial_sums(x_ptr, sums_ptr, size, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    index = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < size, other=0.0).to(tl.float64)
    tl.store(sums_ptr + block, tl.sum(x * x, 0))


def squared_norm(x: Tensor) -> Tensor:
    """Compute reference.squared_norm for contiguous fp32, bf16 or fp16; n elements are off by at most n 2^-53 of the
    sum. Reads `x` once; takes 8 bytes of temporary memory for each 8192 elements.
    """
    blocks = triton.cdiv(x.numel(), _BLOCK)
    sums = torch.empty(blocks, dtype=torch.float64, device=x.device)
    _partial_sums[(blocks,)](x, sums, x.numel(), BLOCK=_BLOCK, num_warps=8)
    return sums.sum()

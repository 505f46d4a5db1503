"""Cross-entropy of a slice of the logits as Triton kernels: logits stay narrow, and their gradient overwrites them."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 2048


@triton.jit
def _sums(logits_ptr, labels_ptr, maximum_ptr, total_ptr, target_ptr, stride, num_valid, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits_ptr + row * stride
    maximum = float("-inf")
    total = 0.0
    for first in range(0, num_valid, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        logits = tl.load(start + columns, mask=columns < num_valid, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(logits, 0))
        total = total * tl.exp(maximum - higher) + tl.sum(tl.exp(logits - higher), 0)
        maximum = higher
    label = tl.load(labels_ptr + row)
    target = tl.load(start + label, mask=label >= 0, other=0.0).to(tl.float32)
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)
    tl.store(target_ptr + row, target)


@triton.jit
def _gradient(logits_ptr, labels_ptr, lse_ptr, grad_ptr, stride, size, num_valid, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = logits_ptr + row * stride + columns
    logits = tl.load(at, mask=columns < num_valid, other=float("-inf")).to(tl.float32)
    softmax = tl.exp(logits - tl.load(lse_ptr + row))
    gradient = tl.where(columns == tl.load(labels_ptr + row), softmax - 1.0, softmax) * tl.load(grad_ptr + row)
    tl.store(at, gradient.to(logits_ptr.dtype.element_ty), mask=columns < size)


def logit_sums(
    logits: Tensor, labels: Tensor, num_valid: int, largest: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute reference.logit_sums for fp32, bf16 or fp16, in one pass; sums are in fp32.

    The gradient's kernel computes exponentials from the logits again, so the last tensor is `logits` itself."""
    maximum, total, target = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(3))
    _sums[(logits.shape[0],)](
        logits, labels, maximum, total, target, logits.stride(0), num_valid, BLOCK=_BLOCK, num_warps=8
    )
    of_all = largest(maximum.clone())
    return of_all, total.mul_(maximum.sub_(of_all).exp_()), target, logits


def logit_gradient_(
    logits: Tensor, exponentials: Tensor, labels: Tensor, maximum: Tensor, total: Tensor, grad: Tensor, num_valid: int
) -> None:
    """Compute reference.logit_gradient_ for fp32, bf16 or fp16; it does not read `exponentials`."""
    num_rows, size = logits.shape
    lse = total.log().add_(maximum)
    _gradient[(num_rows, triton.cdiv(size, _BLOCK))](
        logits, labels, lse, grad, logits.stride(0), size, num_valid, BLOCK=_BLOCK, num_warps=8
    )

"""Norms in plain torch, for CPUs and as the reference for kernels."""

import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of x [..., h] with a bias, RMSNorm without one. RMSNorm's weight may be wider than x; statistics of
    narrow inputs are in fp32."""
    if bias is not None:
        return F.layer_norm(x, weight.shape, weight, bias, epsilon)
    if x.dtype == weight.dtype:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    # torch's fused kernel for GPUs takes one dtype; with two dtypes torch runs many operations instead.
    return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the sum x + residual in their dtype, and its norm."""
    total = x + residual
    return total, norm(total, weight, bias, epsilon)

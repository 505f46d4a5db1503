"""Norms in plain torch: what CPUs run, and what the kernels are held to."""

import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of x [..., h] with a bias, RMSNorm without one, whose weight may be wider than x; statistics of narrow
    inputs are in fp32."""
    if bias is None:
        # torch's kernel for GPUs takes one dtype, and composes the norm of many operations where there are two.
        return F.rms_norm(x.to(weight.dtype), weight.shape, weight, epsilon).to(x.dtype)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum x + residual in their dtype, and its norm."""
    total = x + residual
    return total, norm(total, weight, bias, epsilon)

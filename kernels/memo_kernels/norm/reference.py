"""Norms in plain torch: what CPUs run, and what the kernels are held to."""

import torch.nn.functional as F
from torch import Tensor


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> Tensor:
    """LayerNorm of x [..., h] with a bias, RMSNorm without one; statistics of narrow inputs are in fp32."""
    if bias is None:
        return F.rms_norm(x, weight.shape, weight, epsilon)
    return F.layer_norm(x, weight.shape, weight, bias, epsilon)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, epsilon: float) -> tuple[Tensor, Tensor]:
    """The sum x + residual in their dtype, and its norm."""
    total = x + residual
    return total, norm(total, weight, bias, epsilon)

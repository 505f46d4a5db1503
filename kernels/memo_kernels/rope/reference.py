"""Rotation in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, heads, d] turned by the angles whose cos and sin are [s, b, 1, d/2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In place; for autograd's graph the values before are lost, so only where nothing needs them."""
    return x.copy_(rotate(x, cos, sin))

"""Rotation in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [s, b, heads, d] turned by the angles whose cos and sin are [s, b, 1, d/2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Turn x in place, with `back` the other way: so a gradient comes back through a rotation.

    Not differentiable: the values before are lost, which a rotation's own gradient does not need.
    """
    low, high = x.chunk(2, dim=-1)
    sign = -1 if back else 1
    turned = (low * cos).sub_(high * sin, alpha=sign)
    high.mul_(cos).add_(low * sin, alpha=sign)
    low.copy_(turned)

"""Rotation in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [s, b, heads, d], rotated by the angles whose cos and sin are [s, b, 1, d/2]."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate x in place, with `back` in the opposite direction, which is the backward of a rotation.

    Not differentiable by autograd: the old values are lost, which a rotation's gradient does not need.
    """
    low, high = x.chunk(2, dim=-1)
    sign = -1 if back else 1
    turned = (low * cos).sub_(high * sin, alpha=sign)
    high.mul_(cos).add_(low * sin, alpha=sign)
    low.copy_(turned)

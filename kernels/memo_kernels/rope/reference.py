"""Rotation in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return x [s, b, heads, d], rotated by the angles whose cos and sin are [s, b, 1, d/2]."""
    low, high = x.chunk(2, dim=-1)
    turned = torch.addcmul(low * cos, high, sin, value=-1), torch.addcmul(high * cos, low, sin)
    return torch.cat(turned, dim=-1)


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, *, back: bool = False) -> None:
    """Rotate x in place, with `back` in the opposite direction, which is the backward of a rotation.

    Not differentiable by autograd: the old values are lost, which a rotation's gradient does not need.
    """
    low, high = x.chunk(2, dim=-1)
    sign = -1 if back else 1
    turned = (low * cos).addcmul_(high, sin, value=-sign)
    high.mul_(cos).addcmul_(low, sin, value=sign)
    low.copy_(turned)

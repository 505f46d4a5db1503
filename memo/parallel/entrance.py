"""Where a graph of autograd begins: at what another stage, or a layer whose graph is another one, has passed on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Entrance:
    """Takes the gradient of what entered.

    As `grad` of a leaf would, but the tensor that entered is not kept, and its gradient is not copied: it may be a
    stand-in for hidden states that are not on the device (memo.parallel.hidden).
    """

    grad: Tensor | None = None


def enter(x: Tensor, entrance: Entrance) -> Tensor:
    """x, as the beginning of a graph; its gradient goes to `entrance`."""
    anchor = torch.empty(0, device=x.device, requires_grad=True)  # only so that autograd follows
    entered: Tensor = _Enter.apply(anchor, x.detach(), entrance)
    return entered


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, x: Tensor, entrance: Entrance) -> Tensor:
        ctx.entrance = entrance
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, None]:
        (ctx.entrance.grad,) = grads
        return None, None, None

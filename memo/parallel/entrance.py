"""The beginning of an autograd graph: hidden states from another stage, or from a layer with a graph of its own."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Entrance:
    """Takes the gradient of the tensor that entered.

    A leaf's `grad` would do the same, but would keep the tensor and copy the gradient. Here tensor and gradient may be
    stand-ins for hidden states that are not on the device (memo.parallel.hidden).
    """

    grad: Tensor | None = None


def enter(x: Tensor, entrance: Entrance) -> Tensor:
    """Return x as the beginning of a graph; its gradient goes to `entrance`."""
    anchor = torch.empty(0, device=x.device, requires_grad=True)  # without it, autograd would make no graph
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

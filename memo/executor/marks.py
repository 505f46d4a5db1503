"""Calls a function at a chosen point of autograd's backward."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def on_backward(x: Tensor, call: Callable[[], None]) -> Tensor:
    """A view of x; `call` runs in backward once the gradient of x is known, before the backward of what computed x."""
    marked: Tensor = _OnBackward.apply(x, call)
    return marked


class _OnBackward(torch.autograd.Function):
    """The identity, whose backward calls a function."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], None]) -> Tensor:
        ctx.call = call
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.call()
        return grads[0], None

"""A layer whose states come and go, wrapped from outside: plain, recomputed or token-wise alike."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from memo.executor.marks import on_backward
from memo.executor.states import StateStreamer


class StreamedLayer(nn.Module):
    """Asks for the layer's weights before each forward and backward, and for a place for its gradient.

    The two marks enclose the layer in autograd's graph: what accumulates gradients of its parameters runs as soon as
    they are known, thus before the mark at its input.
    """

    def __init__(self, layer: nn.Module, index: int, states: StateStreamer) -> None:
        super().__init__()
        self.layer, self.index, self.states = layer, index, states

    def forward(self, x: Tensor, context: Any) -> Tensor:
        if not torch.is_grad_enabled():
            self.states.begin_unplanned(self.index)
            plain: Tensor = self.layer(x, context)
            self.states.end_unplanned(self.index)
            return plain
        self.states.begin("F", self.index)
        entered = on_backward(x, functools.partial(self.states.end, "B", self.index))
        y = self.layer(entered, context)
        self.states.end("F", self.index)
        return on_backward(y, functools.partial(self.states.begin, "B", self.index))

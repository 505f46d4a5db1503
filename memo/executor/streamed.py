"""A wrapper for a layer whose states stream; the layer may be plain, recomputed or token-wise."""

import functools
from typing import Any

import torch
from torch import Tensor, nn

from memo.executor.marks import on_backward
from memo.executor.states import StateStreamer


class StreamedLayer(nn.Module):
    """Requests the layer's weights before each forward and backward, and memory for its gradient before each backward.

    Marks at the layer's input and output enclose it in autograd's graph. Autograd accumulates the gradient of a
    parameter as soon as it is known, and so before the mark at the input.
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

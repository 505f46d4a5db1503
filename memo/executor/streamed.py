"""A wrapper for a layer whose weights are not always on the device: they stream, or are decoded from quantized ones.
The layer may be plain, recomputed or token-wise."""

import functools
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from memo.executor.marks import on_backward


class LayerStates(Protocol):
    """Brings the weights of layers (memo.executor.states, memo.executor.coded_weights)."""

    def begin(self, kind: str, layer: int) -> None: ...
    def end(self, kind: str, layer: int) -> None: ...
    def begin_unplanned(self, layer: int) -> None: ...
    def end_unplanned(self, layer: int) -> None: ...


class StreamedLayer(nn.Module):
    """Requests the layer's weights before each forward and backward, and memory for its gradient before each backward.

    Marks at the layer's input and output enclose the layer in autograd's graph. Autograd accumulates a parameter's
    gradient as soon as it is known, so before it reaches the mark at the input.
    """

    def __init__(self, layer: nn.Module, index: int, states: LayerStates) -> None:
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

"""A transformer layer whose activations stay on the device, with the same operations as under a swap plan.

--recompute-granularity says which activations are dropped after forward, and recomputed before backward:

    none        nothing
    selective   attention's output and log-sum-exp
    full        everything but the input

In all three cases norms and the activation run again in backward, one after the other, so a layer never keeps more than
input, qkv, attention's outputs, residual and fc1. The results equal those of the swapped layer with the same number of
tiles, to the last bit. With kernels that never form the score matrix, "selective" frees little; it is here for
comparison.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from memo.executor.custom_layer import CustomLayerOperations
from memo.executor.layer import WholeLayer
from memo.executor.layer_on_tiles import ExplicitLayer
from memo.executor.tile_machine import Context
from memo.parallel.dtypes import torch_dtype
from memo.spec.slots import Resident


class DeviceMemory:
    """Allocates the tensors that layers keep, on request; they are freed with their last reference."""

    def __init__(self, resident: Resident, device: torch.device) -> None:
        self.dropped, self._places, self._device = resident.dropped, resident.made, device

    def make(self, names: Collection[str] | None = None) -> dict[str, Tensor]:
        """Return new tensors [rows, b, width] for these values, in the order in which a layer computes them; None: for
        all."""
        return {
            name: torch.empty(place.shape, dtype=torch_dtype(place.dtype), device=self._device)
            for name, place in self._places.items()
            if names is None or name in names
        }


class ResidentLayer(WholeLayer):
    """Runs a plain layer; each microbatch has tensors of its own between its forward and its backward."""

    memory: DeviceMemory

    def forward(self, x: Tensor, context: Context) -> Tensor:
        microbatch = _Microbatch(self)
        if not torch.is_grad_enabled():
            return microbatch.run_forward(x, context)
        y: Tensor = ExplicitLayer.apply(x, microbatch, context)
        return y

    def drop(self, kept: dict[str, Tensor], names: Collection[str]) -> None:
        for name in names:
            kept.pop(name, None)


class ResidentCustomLayer(CustomLayerOperations, ResidentLayer):
    """A custom layer that keeps only its input."""


class _Microbatch:
    """One microbatch of a layer, from its forward to the end of its backward."""

    def __init__(self, layer: Any) -> None:
        self._layer, self._kept = layer, dict[str, Tensor]()

    def run_forward(self, x: Tensor, context: Context) -> Tensor:
        layer = self._layer
        self._kept = {"input": x.detach(), **layer.memory.make()}
        y: Tensor = layer.forward_in(self._kept, context)
        layer.drop(self._kept, layer.memory.dropped)
        return y

    def run_backward(self, grad: Tensor, context: Context) -> Tensor:
        layer, dropped = self._layer, self._layer.memory.dropped
        self._kept |= layer.memory.make(dropped)
        layer.compute_again(self._kept, context)
        if "attention_out" in dropped:
            layer.attend(self._kept, context)
        grad_x: Tensor = layer.backward_in(self._kept, grad, context)
        self._kept.clear()
        layer.gradients_done()
        return grad_x

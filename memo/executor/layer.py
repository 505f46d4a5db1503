"""A transformer layer executed under a swap plan.

One autograd.Function per layer, on T fixed tiles of tokens.
Forward writes its skeletal activations into a rounding buffer; backward finds there what came back from
host memory, and recomputes tile by tile what was left behind, with the same operations on the same tiles:
the result does not depend, to the last bit, on how much was moved. What is done on one tile, and the shapes, stand in
`memo.executor.tile_machine`; a slot holds all s tokens of this context-parallel rank.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.executor.pieces import GradientSink
from memo.executor.tile_machine import Context, ExplicitLayer, LayerOnTiles, Slots, Tile
from memo.program.kinds import Kind


class Buffers(Slots, Protocol):
    """Gives a layer the tensors of its slot, in the order of a plan (memo.executor.runtime)."""

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]: ...
    def end(self, kind: str, layer: int) -> None: ...


class TokenwiseLayer(LayerOnTiles):
    """Runs a plain layer under a swap plan; in evaluation, without gradients, it only calls the plain layer."""

    memory: Buffers

    def __init__(
        self,
        layer: Any,  # a Layer that is an nn.Module
        kind: Kind,
        index: int,
        tiles: list[Tile],
        memory: Buffers,
        sink: GradientSink,
        tp_group: ProcessGroup | None,
    ) -> None:
        super().__init__(layer, kind, memory, sink, tp_group)
        self.index, self.tiles = index, tiles
        self._lse_shape = torch.Size()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():
            y: Tensor = self.layer(x, context)
        else:
            y = ExplicitLayer.apply(x, self, context)
        return y

    def run_forward(self, x: Tensor, context: Context) -> Tensor:
        """x [n, b, h] -> y [n, b, h]; leaves the skeletal activations in this layer's slot."""
        kept = self.memory.begin("F", self.index)
        kept["input"].copy_(x)
        for tile in self.tiles:
            self.compute_qkv(kept, tile, context)
        q, k, v = self._attention_inputs(kept["qkv"], context.rope)
        out = kept["attention_out"].unflatten(-1, (-1, self.layer.attention.head_dim))
        _, lse = self.layer.attention.core.forward(q, k, v, context.documents, out)
        self._lse_shape = lse.shape
        kept["lse"].view(lse.shape).copy_(lse)
        del q, k, v, out, lse
        y = torch.empty_like(x)
        for tile in self.tiles:
            self._finish(kept, tile, context, y[tile.shard])
        self.memory.end("F", self.index)
        return y

    def run_backward(self, grad: Tensor, context: Context) -> Tensor:
        """Gradient of the output [n, b, h] -> of the input; weight gradients go to the sink."""
        grad = grad.contiguous()
        kept = self.memory.begin("B", self.index)
        for tile in self.tiles:
            if "qkv" not in self.kept_of(tile):
                self.compute_qkv(kept, tile, context)
        out = kept["attention_out"]
        grad_residual, grad_out = torch.empty_like(grad), torch.empty_like(out)
        for tile in reversed(self.tiles):
            of_tile = grad[tile.shard], grad_residual[tile.shard]
            grad_out[tile.full] = self._finish_backward(kept, tile, context, *of_tile)
        q, k, v = self._attention_inputs(kept["qkv"], context.rope)
        heads = (-1, self.layer.attention.head_dim)
        grads = self.layer.attention.core.backward(
            grad_out.unflatten(-1, heads),
            *(q, k, v),
            out.unflatten(-1, heads),
            kept["lse"].view(self._lse_shape),
            context.documents,
        )
        del q, k, v, grad_out
        grad_x = torch.empty_like(grad)
        for tile in reversed(self.tiles):
            of_heads = tuple(grad[tile.full] for grad in grads)
            self._qkv_backward(kept, tile, context, of_heads, grad_residual[tile.shard], grad_x[tile.shard])
        self.memory.end("B", self.index)
        for parameter in self.layer.parameters():
            self.sink.gradient_done(parameter)
        return grad_x

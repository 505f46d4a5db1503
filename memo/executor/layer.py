"""A transformer layer that runs under a swap plan.

One autograd.Function per layer works on T fixed tiles of tokens. Forward writes the skeletal activations into a
rounding buffer (a slot). Backward finds in the slot the activations that came back from host memory, and recomputes the
rest tile by tile, with the same operations on the same tiles. So the results do not depend, to the last bit, on how
much was moved. `memo.executor.tile_machine` defines the operations on a tile and the shapes; a slot holds all s tokens
of this context-parallel rank.
"""

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from memo.executor.layer_on_tiles import ExplicitLayer, LayerOnTiles
from memo.executor.tile_machine import Context


class Buffers(Protocol):
    """Gives a layer the tensors of its slot, in the order of a plan (memo.executor.runtime)."""

    @property
    def unplanned(self) -> "Buffers": ...
    def begin(self, kind: str, layer: int) -> dict[str, Tensor]: ...
    def end(self, kind: str, layer: int) -> None: ...


class WholeLayer(LayerOnTiles):
    """A layer that works on all tokens of this rank at once; `kept` holds its activations by name."""

    _lse_shape = torch.Size()

    def forward_in(self, kept: dict[str, Tensor], context: Context) -> Tensor:
        """Compute the output [n, b, h] from the input in `kept`; writes all other activations in `kept`."""
        for tile in self.tiles:
            self.compute_qkv(kept, tile, context)
        self.attend(kept, context)
        y = torch.empty_like(kept["input"])
        for tile in self.tiles:
            self._finish(kept, tile, context, y[tile.shard])
        return y

    def attend(self, kept: dict[str, Tensor], context: Context) -> None:
        """Compute attention's output and log-sum-exp from qkv, all in `kept`."""
        if self.kind.is_linear:
            self.layer.attention.core.forward(kept["qkv"], kept["attention_out"], context.documents)
            return
        q, k, v = self._attention_inputs(kept["qkv"], context.rope)
        out = kept["attention_out"].unflatten(-1, (-1, self.layer.attention.head_dim))
        _, lse = self.layer.attention.core.forward(q, k, v, context.documents, out, self._sinks())
        self._lse_shape = lse.shape
        kept["lse"].view(lse.shape).copy_(lse)

    def compute_again(self, kept: dict[str, Tensor], context: Context) -> None:
        """Recompute the tiles of qkv that were not kept."""
        for tile in self.tiles:
            if "qkv" not in self.kept_of(tile):
                self.compute_qkv(kept, tile, context, again=True)

    def backward_in(self, kept: dict[str, Tensor], grad: Tensor, context: Context) -> Tensor:
        """Gradient of the output [n, b, h] -> of the input; `kept` holds at least all of qkv and attention's outputs.

        Weight gradients go to the sink.
        """
        grad = grad.contiguous()
        out = kept["attention_out"]
        grad_residual, grad_out = torch.empty_like(grad), torch.empty_like(out) if len(self.tiles) > 1 else None
        for tile in reversed(self.tiles):
            grad_attention_out = self._finish_backward(kept, tile, context, grad[tile.shard], grad_residual[tile.shard])
            if grad_out is None:
                grad_out = grad_attention_out
            else:
                grad_out[tile.full] = grad_attention_out
            del grad_attention_out
        assert grad_out is not None
        self.drop(kept, {name for operation in self.kind.after for name in operation.makes})
        del out
        grads = self._attention_backward(kept, grad_out, context)
        del grad_out
        self.drop(kept, {"attention_out", "lse"})
        grad_x = torch.empty_like(grad)
        for tile in reversed(self.tiles):
            tile_grads = [grad[tile.full] for grad in grads]
            attention_grads = tile_grads[0] if self.kind.is_linear else tuple(tile_grads)
            self._qkv_backward(kept, tile, context, attention_grads, grad_residual[tile.shard], grad_x[tile.shard])
        return grad_x

    def _attention_backward(self, kept: dict[str, Tensor], grad_out: Tensor, context: Context) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v; for a gated delta net the gradient of qkv."""
        attention = self.layer.attention
        if self.kind.is_linear:
            return attention.core.backward(grad_out, kept["qkv"], self.sink.main_gradient, context.documents)[:1]
        q, k, v = self._attention_inputs(kept["qkv"], context.rope)
        heads = (-1, attention.head_dim)
        grads: tuple[Tensor, ...] = attention.core.backward(
            grad_out.unflatten(-1, heads),
            *(q, k, v),
            kept["attention_out"].unflatten(-1, heads),
            kept["lse"].view(self._lse_shape),
            context.documents,
            self._sinks(backward=True),
        )
        return grads

    def drop(self, kept: dict[str, Tensor], names: Collection[str]) -> None:
        """Called when nothing needs these values any more; a slot keeps its memory."""


class TokenwiseLayer(WholeLayer):
    """Runs a plain layer under a swap plan; an evaluation, without gradients, runs outside of the plan."""

    memory: Buffers

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(x, context, self.memory.unplanned)
        y: Tensor = ExplicitLayer.apply(x, self, context)
        return y

    def run_forward(self, x: Tensor, context: Context) -> Tensor:
        """x [n, b, h] -> y [n, b, h]; leaves the skeletal activations in this layer's slot."""
        return self._forward(x, context, self.memory)

    def _forward(self, x: Tensor, context: Context, memory: Buffers) -> Tensor:
        kept = self.own(memory.begin("F", self.index))
        kept["input"].copy_(x)
        y = self.forward_in(kept, context)
        memory.end("F", self.index)
        return y

    def run_backward(self, grad: Tensor, context: Context) -> Tensor:
        """Gradient of the output [n, b, h] -> of the input; weight gradients go to the sink."""
        kept = self.own(self.memory.begin("B", self.index))
        self.compute_again(kept, context)
        grad_x = self.backward_in(kept, grad, context)
        self.memory.end("B", self.index)
        self.gradients_done()
        return grad_x

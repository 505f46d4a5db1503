"""The operations of a layer on one tile of tokens, with what they find in a rounding buffer and leave there.

Forward, recomputation and backward of a tile are the same whatever a slot holds: a whole layer (memo.executor.layer)
or one section of it (memo.executor.sweep). The operations on matrices are those of `memo.executor.pieces`.

Layout: tile t of the context-parallel rank's tokens is split over the tp ranks, so a tile is contiguous both
sharded (rows of [n, b, ...]) and gathered (rows of [s, b, ...]).

Shapes: n = s / tp and s tokens of this context-parallel rank that the slot holds, b micro-batch, a / k query and
key/value heads of this tp rank, d head size, f inner width of the MLP on this rank (2 f when gated, before the
activation); T tiles in the slot.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.executor.pieces import (
    Gathering,
    GradientSink,
    Linear,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from memo.parallel.collectives import all_gather
from memo.parallel.context import ContextAttention
from memo.parallel.replayed import Replayed
from memo.spec.slots import SlotLayout


class Rope(Protocol):
    def rows(self, tokens: slice) -> Any: ...


class Context(Protocol):
    """Positions and documents of the tokens of a microbatch, in the gathered order."""

    @property
    def rope(self) -> Rope | None: ...
    @property
    def documents(self) -> Any: ...


class SelfAttention(Protocol):
    qkv: Linear
    projection: Linear
    core: ContextAttention
    head_dim: int
    q_norm: nn.Module | None
    k_norm: nn.Module | None
    normed_heads: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    rotate_: Callable[..., None]


class Mlp(Protocol):
    fc1: Linear
    fc2: Linear
    activate: Callable[[Tensor], Tensor]


class Norm(Protocol):
    def __call__(self, x: Tensor) -> Tensor: ...
    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]: ...


class Layer(Protocol):
    """The interface of a layer for the executor; memo.model.layer.TransformerLayer has it."""

    attention_norm: Norm
    attention: SelfAttention
    mlp_norm: Norm
    mlp: Mlp


class Slots(Protocol):
    """Rounding buffers that are all laid out alike."""

    layout: SlotLayout


class RunsExplicitly(Protocol):
    """Forward and backward of a layer, from [n, b, h] to [n, b, h]; weight gradients go to its sink."""

    def run_forward(self, x: Tensor, context: Context) -> Tensor: ...
    def run_backward(self, grad: Tensor, context: Context) -> Tensor: ...


@dataclass(frozen=True)
class Tile:
    """The ranges of rows of one tile, in sharded and in gathered tensors."""

    index: int
    shard: slice
    full: slice


def make_tiles(num_tokens: int, tp: int, count: int) -> list[Tile]:
    """Divide s = num_tokens gathered tokens into `count` equal tiles."""
    full, shard = num_tokens // count, num_tokens // (count * tp)
    return [Tile(i, slice(i * shard, (i + 1) * shard), slice(i * full, (i + 1) * full)) for i in range(count)]


class TileOperations(nn.Module):
    """The operations of one layer on a tile, in the slot that `memory` lays out."""

    def __init__(self, layer: Any, memory: Slots, sink: GradientSink, tp_group: ProcessGroup | None) -> None:
        """`layer` is a Layer that is an nn.Module."""
        super().__init__()
        self.layer: Any = layer
        self.memory, self.sink, self.group = memory, sink, tp_group

    def _finish(self, kept: dict[str, Tensor], tile: Tile, out: Tensor) -> None:
        """From attention's output to that of the layer, [n / T, b, h], which is written to `out`."""
        residual, active = self._mlp_active(kept, tile)
        torch.add(residual, row_forward(active, self.layer.mlp.fc2, self.group), out=out)

    def _keep_again(self, kept: dict[str, Tensor], tile: Tile) -> None:
        """What the slot keeps of the tile of all that is made after attention, without the layer's output."""
        made = ("residual", "mlp_norm", "fc1", "activation")
        if any(self._is_kept(name, self._rows(name, tile)) for name in made):
            self._mlp_active(kept, tile)

    def _mlp_active(self, kept: dict[str, Tensor], tile: Tile) -> tuple[Tensor, Tensor]:
        """The residual after attention [n / T, b, h], and what the MLP's second matrix takes, [s / T, b, f]."""
        residual, normed = self.layer.mlp_norm.of_sum(kept["input"][tile.shard], self._projected(kept, tile))
        self._keep("residual", residual, kept, tile)
        self._keep("mlp_norm", normed, kept, tile)
        gathered = all_gather(normed, self.group)
        inner = column_forward(gathered, self.layer.mlp.fc1, out=self._recall("fc1", kept, tile))
        del gathered
        return residual, self._keep("activation", self.layer.mlp.activate(inner), kept, tile)

    def _finish_backward(self, kept: dict[str, Tensor], tile: Tile, grad: Tensor, grad_residual: Tensor) -> Tensor:
        """From the layer's output back to the residual and to attention's output, in the rows of one tile.

        Messages of a group run one after another, so the message that is needed first is started first.

        Args:
            grad: of the output, [n, b, h].
            grad_residual: as large; the tile's rows of it are written. It may be `grad` itself.

        Returns the gradient of attention's output, [s / T, b, a d].
        """
        mlp, group, sink = self.layer.mlp, self.group, self.sink
        inner = self._recall("fc1", kept, tile)
        if inner is not None:
            gradients = Gathering(grad[tile.shard], group)
        residual = self._recall("residual", kept, tile)
        residual = self.compute_residual(kept, tile) if residual is None else residual
        norm = Replayed(self.layer.mlp_norm, residual, self.layer.mlp_norm.parameters())
        normed = self._recall("mlp_norm", kept, tile)
        inputs = Gathering(norm.output if normed is None else normed, group)
        if inner is None:
            gradients = Gathering(grad[tile.shard], group)
            inner = column_forward(inputs.wait(), mlp.fc1)
        activation = Replayed(mlp.activate, inner, ())
        active = self._recall("activation", kept, tile)
        active = activation.output if active is None else active
        grad_active = row_backward(grad[tile.shard], gradients, active, mlp.fc2, sink)
        del gradients
        grad_inner = activation.backward(sink.main_gradient, grad_active)
        grad_normed = column_backward(grad_inner, inputs, mlp.fc1, group, sink)
        torch.add(norm.backward(sink.main_gradient, grad_normed), grad[tile.shard], out=grad_residual[tile.shard])
        sums, projection = grad_residual[tile.shard], self.layer.attention.projection
        attended = kept["attention_out"][tile.full]
        return row_backward(sums, Gathering(sums, group), attended, projection, sink)

    def _qkv_backward(self, kept: dict[str, Tensor], tile: Tile, grads: Sequence[Tensor], context: Context) -> Tensor:
        """From the tile's gradients of q, k and v, [s / T, b, heads, d] each, to that of its input, [n / T, b, h].

        The gradients of q and k are overwritten.
        """
        grad_q, grad_k, grad_v = grads
        attention, norm_module = self.layer.attention, self.layer.attention_norm
        norm = Replayed(norm_module, kept["input"][tile.shard], norm_module.parameters())
        normed = self._recall("attention_norm", kept, tile)
        inputs = Gathering(norm.output if normed is None else normed, self.group)
        attention.rotate_(grad_q, grad_k, self._rope_rows(context, tile), back=True)  # in place
        # Without q_norm the slot holds rotated heads, but then this function only splits qkv into heads, so that its
        # backward does not read them.
        heads = Replayed(
            attention.normed_heads, kept["qkv"][tile.full], _parameters(attention.q_norm, attention.k_norm)
        )
        grad_qkv = heads.backward(self.sink.main_gradient, grad_q, grad_k, grad_v)
        grad_normed = column_backward(grad_qkv, inputs, attention.qkv, self.group, self.sink)
        return norm.backward(self.sink.main_gradient, grad_normed)

    # Operations that forward and recomputation share.

    def compute_qkv(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> None:
        """qkv of one tile into its buffer; rotated there, unless heads are normed and backward needs them raw."""
        attention = self.layer.attention
        normed = self._keep("attention_norm", self.layer.attention_norm(kept["input"][tile.shard]), kept, tile)
        qkv = column_forward(all_gather(normed, self.group), attention.qkv, out=kept["qkv"][tile.full])
        if attention.q_norm is None:
            q, k, _ = attention.normed_heads(qkv)
            attention.rotate_(q, k, self._rope_rows(context, tile))

    def _attention_inputs(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """What attention takes, of the rows `qkv` of the slot, whose positions `rope` has."""
        attention = self.layer.attention
        q, k, v = attention.normed_heads(qkv)
        if attention.q_norm is not None:
            attention.rotate_(q, k, rope)  # not views of the slot, which keeps unrotated heads
        return q, k, v

    def compute_residual(self, kept: dict[str, Tensor], tile: Tile) -> Tensor:
        """The sum that `of_sum` computes in forward, to the bit; backward applies the norm to it under a graph."""
        return kept["input"][tile.shard] + self._projected(kept, tile)

    def recomputations(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> dict[str, Callable[[], object]]:
        """By group, what backward does for a tile of which nothing has moved; to be called after a forward."""
        normed = self.layer.attention_norm(kept["input"][tile.shard])
        return {
            "qkv": lambda: self.compute_qkv(kept, tile, context),
            "residual": lambda: self.compute_residual(kept, tile),
            "fc1": lambda: column_forward(all_gather(normed, self.group), self.layer.mlp.fc1),
        }

    def _projected(self, kept: dict[str, Tensor], tile: Tile) -> Tensor:
        return row_forward(kept["attention_out"][tile.full], self.layer.attention.projection, self.group)

    def _rope_rows(self, context: Context, tile: Tile) -> Any:
        return None if context.rope is None else context.rope.rows(tile.full)

    # Rows of tensors in the slot.

    def _rows(self, name: str, tile: Tile) -> slice:
        return tile.shard if name in ("attention_norm", "residual", "mlp_norm") else tile.full

    def _is_kept(self, name: str, rows: slice) -> bool:
        return rows.stop <= self.memory.layout.saved_rows(name)

    def _keep(self, name: str, value: Tensor, kept: dict[str, Tensor], tile: Tile) -> Tensor:
        """Copy one tile's value to the slot if backward is to find it there; returns the value."""
        rows = self._rows(name, tile)
        if self._is_kept(name, rows):
            kept[name][rows].copy_(value)
        return value

    def _recall(self, name: str, kept: dict[str, Tensor], tile: Tile) -> Tensor | None:
        """One tile's value in the slot; None if it was not kept and must be recomputed."""
        rows = self._rows(name, tile)
        return kept[name][rows] if self._is_kept(name, rows) else None


class ExplicitLayer(torch.autograd.Function):
    """A layer with an explicit backward; saves no tensor, because all are views of buffers that are reused before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RunsExplicitly, context: Context) -> Tensor:
        ctx.layer, ctx.context = layer, context
        return layer.run_forward(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.layer.run_backward(grads[0], ctx.context), None, None


def _parameters(*modules: nn.Module | None) -> list[nn.Parameter]:
    return [parameter for module in modules if module is not None for parameter in module.parameters()]

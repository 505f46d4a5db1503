"""A transformer layer executed under a swap plan.

One autograd.Function per layer, made of the pieces of `memo.executor.pieces` on T fixed tiles of tokens.
Forward writes its skeletal activations into a rounding buffer; backward finds there what came back from
host memory, and recomputes tile by tile what was left behind, with the same operations on the same tiles:
the result does not depend, to the last bit, on how much was moved.

Layout: tile t of the context-parallel rank's tokens is split over the tp ranks, so a tile is contiguous both
sharded (rows of [n, b, ...]) and gathered (rows of [s, b, ...]).

Shapes: n = s / tp, s tokens of this context-parallel rank, b micro-batch, a / k query and key/value heads of
this tp rank, d head size, f inner width of the MLP on this rank (2 f when gated, before the activation).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.executor.pieces import (
    Gathering,
    GradientSink,
    Linear,
    Replayed,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from memo.parallel.collectives import all_gather
from memo.spec.slots import SlotLayout


class CoreAttention(Protocol):
    """Attention with an explicit forward and backward (memo.parallel.context)."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, documents: Any = None, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]: ...

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, documents: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]: ...


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
    core: CoreAttention
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


class Buffers(Protocol):
    """Gives a layer the tensors of its slot, in the order of a plan (memo.executor.runtime)."""

    layout: SlotLayout

    def begin(self, kind: str, layer: int) -> dict[str, Tensor]: ...
    def end(self, kind: str, layer: int) -> None: ...


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


class TokenwiseLayer(nn.Module):
    """Runs a plain layer under a swap plan; in evaluation, without gradients, it only calls the plain layer."""

    def __init__(
        self,
        layer: Any,  # a Layer that is an nn.Module
        index: int,
        tiles: list[Tile],
        memory: Buffers,
        sink: GradientSink,
        tp_group: ProcessGroup | None,
    ) -> None:
        super().__init__()
        self.layer: Any = layer
        self.index, self.tiles, self.group = index, tiles, tp_group
        self.memory, self.sink = memory, sink
        self._lse_shape = torch.Size()

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():
            y: Tensor = self.layer(x, context)
        else:
            y = _TokenwiseFunction.apply(x, self, context)
        return y

    def run_forward(self, x: Tensor, context: Context) -> Tensor:
        """x [n, b, h] -> y [n, b, h]; leaves the skeletal activations in this layer's slot."""
        kept = self.memory.begin("F", self.index)
        kept["input"].copy_(x)
        for tile in self.tiles:
            self.compute_qkv(kept, tile, context)
        q, k, v = self._attention_inputs(kept, context)
        out = kept["attention_out"].unflatten(-1, (-1, self.layer.attention.head_dim))
        _, lse = self.layer.attention.core.forward(q, k, v, context.documents, out)
        self._lse_shape = lse.shape
        kept["lse"].view(lse.shape).copy_(lse)
        del q, k, v, out, lse
        y = torch.empty_like(x)
        for tile in self.tiles:
            torch.add(*self._mlp_forward(kept, tile), out=y[tile.shard])
        self.memory.end("F", self.index)
        return y

    def _mlp_forward(self, kept: dict[str, Tensor], tile: Tile) -> tuple[Tensor, Tensor]:
        """The residual after attention, and the output of the MLP that is added to it, [n / T, b, h] each."""
        residual, normed = self.layer.mlp_norm.of_sum(kept["input"][tile.shard], self._projected(kept, tile))
        self._keep("residual", residual, kept, tile)
        self._keep("mlp_norm", normed, kept, tile)
        gathered = all_gather(normed, self.group)
        inner = column_forward(gathered, self.layer.mlp.fc1, out=self._recall("fc1", kept, tile))
        del gathered
        active = self._keep("activation", self.layer.mlp.activate(inner), kept, tile)
        return residual, row_forward(active, self.layer.mlp.fc2, self.group)

    def run_backward(self, grad: Tensor, context: Context) -> Tensor:
        """Gradient of the output [n, b, h] -> of the input; weight gradients go to the sink."""
        kept = self.memory.begin("B", self.index)
        for tile in self.tiles:
            if not self._is_kept("qkv", tile.full):
                self.compute_qkv(kept, tile, context)
        out = kept["attention_out"]
        grad_residual, grad_out = torch.empty_like(grad), torch.empty_like(out)
        for tile in reversed(self.tiles):
            self._mlp_backward(kept, tile, grad, grad_residual, grad_out)
        q, k, v = self._attention_inputs(kept, context)
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
            torch.add(self._qkv_backward(kept, tile, grads, context), grad_residual[tile.shard], out=grad_x[tile.shard])
        self.memory.end("B", self.index)
        for parameter in self.layer.parameters():
            self.sink.gradient_done(parameter)
        return grad_x

    def _mlp_backward(
        self, kept: dict[str, Tensor], tile: Tile, grad: Tensor, grad_residual: Tensor, grad_out: Tensor
    ) -> None:
        """From the layer's output back to the residual and to attention's output, in the rows of one tile.

        Messages of a group run one after another, so the message that is needed first is started first.
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
        grad_inner = activation.backward(sink, grad_active)
        grad_normed = column_backward(grad_inner, inputs, mlp.fc1, group, sink)
        torch.add(norm.backward(sink, grad_normed), grad[tile.shard], out=grad_residual[tile.shard])
        sums, projection = grad_residual[tile.shard], self.layer.attention.projection
        attended = kept["attention_out"][tile.full]
        grad_out[tile.full] = row_backward(sums, Gathering(sums, group), attended, projection, sink)

    def _qkv_backward(
        self, kept: dict[str, Tensor], tile: Tile, grads: tuple[Tensor, Tensor, Tensor], context: Context
    ) -> Tensor:
        """From the gradients of q, k and v back to the layer's input, [n / T, b, h]."""
        attention, norm_module = self.layer.attention, self.layer.attention_norm
        norm = Replayed(norm_module, kept["input"][tile.shard], norm_module.parameters())
        normed = self._recall("attention_norm", kept, tile)
        inputs = Gathering(norm.output if normed is None else normed, self.group)
        grad_q, grad_k, grad_v = (grad[tile.full] for grad in grads)
        attention.rotate_(grad_q, grad_k, self._rope_rows(context, tile), back=True)  # in place
        # Without q_norm the slot holds rotated heads, but then this function only splits qkv into heads, so that its
        # backward does not read them.
        heads = Replayed(
            attention.normed_heads, kept["qkv"][tile.full], _parameters(attention.q_norm, attention.k_norm)
        )
        grad_qkv = heads.backward(self.sink, grad_q, grad_k, grad_v)
        grad_normed = column_backward(grad_qkv, inputs, attention.qkv, self.group, self.sink)
        return norm.backward(self.sink, grad_normed)

    # Operations that forward and recomputation share.

    def compute_qkv(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> None:
        """qkv of one tile into its buffer; rotated there, unless heads are normed and backward needs them raw."""
        attention = self.layer.attention
        normed = self._keep("attention_norm", self.layer.attention_norm(kept["input"][tile.shard]), kept, tile)
        qkv = column_forward(all_gather(normed, self.group), attention.qkv, out=kept["qkv"][tile.full])
        if attention.q_norm is None:
            q, k, _ = attention.normed_heads(qkv)
            attention.rotate_(q, k, self._rope_rows(context, tile))

    def _attention_inputs(self, kept: dict[str, Tensor], context: Context) -> tuple[Tensor, Tensor, Tensor]:
        attention = self.layer.attention
        q, k, v = attention.normed_heads(kept["qkv"])
        if attention.q_norm is not None:
            attention.rotate_(q, k, context.rope)  # not views of the slot, which keeps unrotated heads
        return q, k, v

    def compute_residual(self, kept: dict[str, Tensor], tile: Tile) -> Tensor:
        """The sum that `of_sum` computes in forward, to the bit; backward applies the norm to it under a graph."""
        return kept["input"][tile.shard] + self._projected(kept, tile)

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


class _TokenwiseFunction(torch.autograd.Function):
    """Saves no tensor for backward, because all are views of buffers that are reused before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: TokenwiseLayer, context: Context) -> Tensor:
        ctx.module, ctx.context = module, context
        return module.run_forward(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.module.run_backward(grads[0].contiguous(), ctx.context), None, None


def _parameters(*modules: nn.Module | None) -> list[nn.Parameter]:
    return [parameter for module in modules if module is not None for parameter in module.parameters()]

"""A layer that computes tile by tile: the token-wise operations before attention and after it.

Forward, recomputation and backward of a tile are the same whether a slot holds a whole layer (memo.executor.layer) or
one section of it (memo.executor.sweep). Shapes as in memo.executor.tile_machine.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.attention.sinks import Sinks
from memo.executor.pieces import GradientSink
from memo.executor.tile_machine import Context, Rope, Tile, TileMachine
from memo.program.kinds import Kind
from memo.program.operations import ExpertRow
from memo.program.walk import Step, forward, gradient, rebuilt
from memo.spec.slots import NEEDS_FULL_ROOM, SlotLayout


class RunsExplicitly(Protocol):
    """Forward and backward of a layer, from [n, b, h] to [n, b, h]; weight gradients go to its sink."""

    def run_forward(self, x: Tensor, context: Context) -> Tensor: ...
    def run_backward(self, grad: Tensor, context: Context) -> Tensor: ...


class LayerOnTiles(nn.Module):
    """One layer that computes tile by tile, on the tensors of a slot."""

    def __init__(
        self,
        layer: Any,
        kind: Kind,
        index: int,
        tiles: list[Tile],
        layout: SlotLayout,
        memory: Any,
        sink: GradientSink,
        group: ProcessGroup | None,
    ) -> None:
        """`layer`: a memo.model.layer.TransformerLayer of this kind, or a custom layer; `tiles`: those of what a slot
        holds; `layout`: where its tensors lie in a slot of `memory`, which has room for layers of all kinds; `group`:
        the tp group."""
        super().__init__()
        self.layer: Any = layer
        self.kind, self.index, self.tiles = kind, index, tiles
        self.layout, self.memory, self.sink, self.group = layout, memory, sink, group
        self.module_of = {op: attrgetter(op.module)(layer) for op in kind.operations if op.module}
        self._kept: dict[int, frozenset[str]] = {}
        self._sharded = frozenset(name for name, layout in kind.layouts.items() if layout == "tokens")

    def kept_of(self, tile: Tile) -> frozenset[str]:
        """Names of the tensors of which the slot holds this tile's rows between forward and backward."""
        found = self._kept.get(tile.index)
        if found is None:
            layout = self.layout
            kept = (name for name in layout.places if self.rows_of(name, tile).stop <= layout.saved_rows(name))
            found = self._kept[tile.index] = frozenset(kept)
        return found

    def own(self, slot: dict[str, Tensor]) -> dict[str, Tensor]:
        """This layer's tensors in a slot; tensors of a narrower kind take the first part of their places."""
        workspace = self.layout.workspace
        places = self.layout.places if workspace is None else {**self.layout.places, NEEDS_FULL_ROOM: workspace}
        return {
            name: x if x.shape == place.shape else x.view(-1)[: math.prod(place.shape)].view(place.shape)
            for name, place in places.items()
            for x in [slot[name]]
        }

    def gradients_done(self) -> None:
        for parameter in self.layer.parameters():
            self.sink.gradient_done(parameter)

    def rows_of(self, name: str, tile: Tile) -> slice:
        return tile.shard if name in self._sharded else tile.full

    # The token-wise operations before attention and after it.

    def compute_qkv(self, kept: dict[str, Tensor], tile: Tile, context: Context, again: bool = False) -> None:
        """Compute qkv of one tile in the slot; rotates it there, unless heads are normed and backward needs it raw.

        `again`: whether in backward, when the slot holds what it keeps."""
        machine = TileMachine(self, kept, tile, context)
        machine.run(self.kind.qkv(machine.kept, again))

    def _finish(self, kept: dict[str, Tensor], tile: Tile, context: Context, out: Tensor) -> None:
        """Compute the layer's output [n / T, b, h] from attention's output, and write it to `out`."""
        machine = TileMachine(self, kept, tile, context)
        machine.places["layer_output"] = out
        machine.run(self.kind.output(machine.kept))

    def _keep_again(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> None:
        """Compute the tensors after attention of which the slot keeps this tile's rows, without the layer's output."""
        machine = TileMachine(self, kept, tile, context)
        made = machine.kept.intersection(name for operation in self.kind.after for name in operation.makes)
        machine.run(forward(self.kind.after, made, machine.kept))

    def _finish_backward(
        self, kept: dict[str, Tensor], tile: Tile, context: Context, grad: Tensor, grad_input: Tensor
    ) -> Tensor:
        """Gradient of the layer's output -> of attention's output [s / T, b, a d].

        Args:
            grad: gradient of the layer's output, [n / T, b, h].
            grad_input: receives the gradient of the input along the residual path, [n / T, b, h]; it may be `grad`.
        """
        machine = TileMachine(self, kept, tile, context)
        walk = self.kind.after_backward(machine.kept)
        machine.live[gradient("layer_output")], machine.places["input"] = grad, grad_input
        machine.run(walk)
        machine.put("input", walk.gradients["input"])
        found: Tensor = machine.live[walk.gradients["attention_out"]]
        return found

    def _qkv_backward(
        self, kept: dict[str, Tensor], tile: Tile, context: Context, grads: Any, *grad_input: Tensor
    ) -> None:
        """Compute the gradient of the tile's input from the gradients of q, k and v.

        Args:
            grads: gradients of q, k and v, [s / T, b, heads, d] each, which are overwritten; for a gated delta net the
                gradient of qkv.
            grad_input: two tensors [n / T, b, h]: the gradient of the input along the residual path, and the memory
                for its sum with the gradient through attention.
        """
        machine = TileMachine(self, kept, tile, context)
        walk = self.kind.before_backward(machine.kept)
        machine.live |= {gradient(self.kind.sequence_input): grads, gradient("input"): grad_input[0]}
        machine.places["input"] = grad_input[1]
        machine.run(walk)
        machine.put("input", walk.gradients["input"])

    def _attention_inputs(self, qkv: Tensor, rope: Rope | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v for attention, from the rows `qkv` of the slot; `rope` holds the positions of these rows."""
        attention = self.layer.attention
        q, k, v = attention.normed_heads(qkv)
        if self.kind.norms_heads:
            attention.rotate_(q, k, rope)  # not views of the slot, which keeps unrotated heads
        return q, k, v

    def _sinks(self, *, backward: bool = False) -> Sinks | None:
        """Attention's sinks, in a backward with their main gradient; None if the layer has none."""
        logits = self.layer.attention.sinks
        return None if logits is None else Sinks(logits, self.sink.main_gradient(logits) if backward else None)

    def recomputations(self, kept: dict[str, Tensor], tile: Tile, context: Context) -> dict[str, Callable[[], object]]:
        """By group of tensors, the work of a tile's backward that is needed only if the group has not moved.

        Call it after a forward.
        """
        stand_ins = self._stand_ins(kept["input"], tile)
        works: dict[str, Callable[[], object]] = {"qkv": lambda: self.compute_qkv(kept, tile, context, again=True)}
        for operations, exist in ((self.kind.before, ("qkv",)), (self.kind.after, ())):
            taken = {name for op in operations for name in (op.reads if op.replays else op.needs)}
            everything = rebuilt(operations, exist)
            for name in (name for op in operations for name in op.makes if name in taken):
                again = everything - rebuilt(operations, (*exist, name))
                if any(op.module for op in again):
                    own = tuple(op for op in operations if op in again)
                    steps = forward(own, frozenset({name}), frozenset(), again=True)
                    works[name] = partial(self._run_alone, steps, kept, tile, context, stand_ins)
        return works

    def _stand_ins(self, x: Tensor, tile: Tile) -> dict[str, Tensor]:
        """By name, stand-ins for the outputs of sums and of replayed operations after attention: zeros for the inputs
        of row-parallel matrices, the layer's input for all others."""
        found = {name: x[tile.shard] for op in self.kind.operations if op.replays or op.is_sum for name in op.makes}
        taken = {name: op for op in self.kind.after if op.scatters for name in op.reads if name in found}
        rows = (tile.full.stop - tile.full.start, x.shape[1])
        for name, operation in taken.items():
            each = self.layer.mlp.config.moe_router_topk if isinstance(operation, ExpertRow) else 1
            found[name] = x.new_zeros(*rows, each * self.module_of[operation].weight.shape[1])
        return found

    def _run_alone(
        self, steps: Sequence[Step], kept: dict[str, Tensor], tile: Tile, context: Context, inputs: dict[str, Tensor]
    ) -> None:
        machine = TileMachine(self, kept, tile, context)
        machine.live |= inputs
        machine.run(steps)


class ExplicitLayer(torch.autograd.Function):
    """A layer with an explicit backward; saves no tensor, because all are views of buffers that are soon reused."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: RunsExplicitly, context: Context) -> Tensor:
        ctx.layer, ctx.context = layer, context
        return layer.run_forward(x, context)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.layer.run_backward(grads[0], ctx.context), None, None

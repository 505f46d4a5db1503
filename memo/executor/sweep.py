"""A transformer layer that is swept along the sequence under a swap plan: each slot holds one section of the sequence.

Forward goes through the sections in order, backward in reverse order. In a section a layer works on fixed tiles, as in
`memo.executor.layer`, but computes each tile from input to output before it begins the next. Attention takes the
queries of a tile and all keys and values up to them; these stay on the device for the whole layer, or as far as windows
reach (memo.executor.key_values). So only keys and values, the sums of their gradients and the hidden states are as long
as the sequence. The hidden states may be in host memory, from which they come section by section
(memo.executor.hidden_states). Context-parallel ranks share every tile (memo.parallel.zigzag) and communicate in
attention: they gather the tile's keys and values, or exchange heads.

A layer that recomputes attention keeps only its input from its forward (memo.executor.section_stream). Its backward
begins with a second forward, up to the activations that slots keep. The keys and values of the second forward stay on
the device if it holds those of the whole sequence.

Hidden states and their gradients are overwritten in place: the output of a tile replaces the tile's input, of which the
slot has a copy, and the gradient of the input replaces the gradient of the output.

Results depend, to the last bit, on the tiles alone: neither on what moves nor on the number of tiles in a section.
Attention is cut into other blocks than in whole layers, so swept and whole layers agree only up to rounding.

Shapes: as in memo.executor.tile_machine; c tokens of a section, sharded c / tp.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from memo.attention.backends import Saved
from memo.executor.key_values import Heads, KeyValues
from memo.executor.layer_on_tiles import ExplicitLayer, LayerOnTiles
from memo.executor.tile_machine import Context, Rope, Tile
from memo.parallel import context_sweep
from memo.parallel.hidden import Hidden, same_memory


class SectionBuffers(Protocol):
    """Gives each section of a layer the tensors of its slot, in the order of a plan (memo.executor.runtime)."""

    @property
    def keys(self) -> KeyValues: ...

    @property
    def unplanned(self) -> "SectionBuffers":
        """The same memory without a plan, between training steps."""

    def begin_section(self, kind: str, layer: int, section: int) -> dict[str, Tensor]: ...
    def end_section(self, kind: str, layer: int, section: int) -> None: ...
    def take_keys(self, layer: int, section: int) -> None: ...
    def put_input(self, layer: int, section: int, x: Tensor) -> None: ...
    def take_input(self, layer: int, section: int, out: Tensor) -> None: ...


@dataclass(frozen=True)
class _Positions:
    """Rope and documents for the tokens of one section."""

    rope: Rope | None
    documents: Any


class SweptLayer(LayerOnTiles):
    """Runs a plain layer section by section; an evaluation, without gradients, runs outside of the plan."""

    memory: SectionBuffers

    def __init__(self, *how: Any, sections: list[Tile], hidden: Hidden, recomputes_attention: bool) -> None:
        """`how`: arguments of LayerOnTiles. `sections` divide the sequence, and tiles each section; a tile's rows count
        from the section's beginning. `hidden` has the same sections."""
        super().__init__(*how)
        self.sections, self.hidden, self.recomputes_attention = sections, hidden, recomputes_attention
        self._carry: Tensor | None = None
        """The state that a gated delta net carries from tile to tile, in backward its gradient; None before the first
        tile and between passes."""

    @property
    def _heads(self) -> Heads:
        """The shape of a token's keys and values in the store."""
        attention = self.layer.attention
        return 2 * attention.heads[1] // attention.core.a2a_size, attention.head_dim

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if not torch.is_grad_enabled():
            return self._forward(x, context, self.memory.unplanned, self.hidden.unplanned)
        y: Tensor = ExplicitLayer.apply(x, self, context)
        return y

    def run_forward(self, x: Tensor, context: Context) -> Tensor:
        """x [n, b, h] -> y [n, b, h] in the place of x; leaves each section's activations in its slot."""
        return self._forward(x, context, self.memory, self.hidden)

    def _forward(self, x: Tensor, context: Context, memory: SectionBuffers, hidden: Hidden) -> Tensor:
        y = same_memory(x)
        for section in self.sections:
            positions = _positions(section, context)
            kept = self.own(memory.begin_section("F", self.index, section.index))
            self._keys_begin(memory, section)
            part = hidden.take(y, section.index)
            kept["input"].copy_(part)
            if self.recomputes_attention:
                memory.put_input(self.index, section.index, part)
            for tile in self.tiles:
                self._attend(kept, section, tile, positions)
                self._finish(kept, tile, positions, part[tile.shard])
            hidden.put(part, section.index)
            memory.end_section("F", self.index, section.index)
        self._carry = None
        return y

    def _forward_again(self, context: Context) -> None:
        """Run forward from the inputs that the first one offloaded; leaves each section's activations in its slot."""
        for section in self.sections:
            positions = _positions(section, context)
            kept = self.own(self.memory.begin_section("F", self.index, section.index))
            self._keys_begin(self.memory, section)
            self.memory.take_input(self.index, section.index, kept["input"])
            for tile in self.tiles:
                self._attend(kept, section, tile, positions)
                self._keep_again(kept, tile, positions)
            self.memory.end_section("F", self.index, section.index)
        self._carry = None

    def _keys_begin(self, memory: SectionBuffers, section: Tile) -> None:
        if not self.kind.is_linear:
            memory.keys.begin("F", section.index)

    def _attend(self, kept: dict[str, Tensor], section: Tile, tile: Tile, positions: _Positions) -> None:
        """Compute one tile's attention; its keys and values go to the store, the output to the slot."""
        self.compute_qkv(kept, tile, positions)
        if self.kind.is_linear:
            self._run_delta_net(kept, section, tile, positions)
            return
        qkv, rows = self._tile_heads(kept, tile, positions), _rows(section, tile)
        own, before = self.memory.keys.own(rows, self._heads), self.memory.keys.before(rows.stop, self._heads)
        out = kept["attention_out"][tile.full].unflatten(-1, (-1, self.layer.attention.head_dim))
        core, sinks, first = self.layer.attention.core, self._sinks(), self.memory.keys.first_token
        lse = context_sweep.forward_rows(core, qkv, own, before, positions.documents, out, sinks, first)
        kept["lse"][tile.full].view(lse.shape).copy_(lse)

    def _run_delta_net(self, kept: dict[str, Tensor], section: Tile, tile: Tile, positions: _Positions) -> None:
        """Do for a gated delta net what `_attend` does for attention."""
        carries, qkv, out = kept["carries"], kept["qkv"][tile.full], kept["attention_out"][tile.full]
        if self._carry is None:
            carries[tile.index].zero_()
        else:
            carries[tile.index].copy_(self._carry)
        core, start = self.layer.attention.core, self._first_token(section, tile)
        self._carry = core.forward(qkv, out, positions.documents, start, carries[tile.index])

    def _first_token(self, section: Tile, tile: Tile) -> int:
        """The position in the sequence of a tile's first token; context-parallel ranks share the tile."""
        return _rows(section, tile).start * self.memory.keys.layout.cp

    def _fetch_keys(self, section: Tile) -> None:
        """Fetch the keys and values that backward needs from this section on, and that are not on the device yet."""
        gathers_again = not self.recomputes_attention or self.memory.keys.layout.slides
        for fetched in self.memory.keys.begin("B", section.index):
            self.memory.take_keys(self.index, fetched)
            if gathers_again:
                self._gather_again(self.sections[fetched])

    def _gather_again(self, section: Tile) -> None:
        """Gather a section's keys and values over cp again, if host memory held only those of this rank's tokens."""
        for tile in self.tiles:
            rows = _rows(section, tile)
            own = self.memory.keys.own(rows, self._heads)
            if own is not None:
                before = self.memory.keys.before(rows.stop, self._heads)
                context_sweep.gather_rows(self.layer.attention.core, own, before)

    def run_backward(self, grad: Tensor, context: Context) -> Tensor:
        """Gradient of the output [n, b, h] -> of the input, in the same place; weight gradients go to the sink."""
        if self.recomputes_attention:
            self._forward_again(context)
        grad = self.hidden.whole(grad)
        if not self.kind.is_linear:
            self.memory.keys.sums.zero_()
        for section in self.sections[::-1]:
            positions = _positions(section, context)
            kept = self.own(self.memory.begin_section("B", self.index, section.index))
            if not self.kind.is_linear:
                self._fetch_keys(section)
            part = self.hidden.take(grad, section.index)
            for tile in reversed(self.tiles):
                self._tile_backward(kept, section, tile, part, positions)
            self.hidden.put(part, section.index)
            self.memory.end_section("B", self.index, section.index)
        self._carry = None
        self.gradients_done()
        return grad

    def _tile_backward(
        self, kept: dict[str, Tensor], section: Tile, tile: Tile, grad: Tensor, positions: _Positions
    ) -> None:
        """Replace this tile's rows of `grad`, the gradient of the output, by the gradient of the input.

        This is a function of its own, so that a tile's gradients are freed before the next tile allocates its own.
        """
        if "qkv" not in self.kept_of(tile):
            self.compute_qkv(kept, tile, positions, again=True)
        rows = grad[tile.shard]
        grad_out = self._finish_backward(kept, tile, positions, rows, rows)
        grads = self._attention_backward(kept, section, tile, grad_out, positions)
        self._qkv_backward(kept, tile, positions, grads, rows, rows)

    def _attention_backward(
        self, kept: dict[str, Tensor], section: Tile, tile: Tile, grad_out: Tensor, positions: _Positions
    ) -> Any:
        """Return the gradients of the tile's q, k and v; for a gated delta net the gradient of qkv."""
        if self.kind.is_linear:
            given = (grad_out, kept["qkv"][tile.full], self.sink.main_gradient, positions.documents)
            carried = (self._first_token(section, tile), kept["carries"][tile.index], self._carry)
            grad_qkv, self._carry = self.layer.attention.core.backward(*given, *carried)
            return grad_qkv
        core, heads = self.layer.attention.core, (-1, self.layer.attention.head_dim)
        q, _, _ = self._tile_heads(kept, tile, positions)
        stop = _rows(section, tile).stop
        out, lse = kept["attention_out"][tile.full].unflatten(-1, heads), kept["lse"][tile.full]
        keys, values = self.memory.keys.before(stop, self._heads).chunk(2, dim=2)
        saved, sums = Saved(q, keys, values, out, lse), self.memory.keys.sums_before(stop, self._heads)
        sinks, grad_out = self._sinks(backward=True), grad_out.unflatten(-1, heads)
        first = self.memory.keys.first_token
        return context_sweep.backward_rows(core, grad_out, saved, sums, positions.documents, sinks, first)

    def _tile_heads(self, kept: dict[str, Tensor], tile: Tile, positions: _Positions) -> tuple[Tensor, Tensor, Tensor]:
        rope = None if positions.rope is None else positions.rope.rows(tile.full)
        return self._attention_inputs(kept["qkv"][tile.full], rope)


def _rows(section: Tile, tile: Tile) -> slice:
    """The rows of a tile among all rows of this context-parallel rank."""
    return slice(section.full.start + tile.full.start, section.full.start + tile.full.stop)


def _positions(section: Tile, context: Context) -> _Positions:
    return _Positions(None if context.rope is None else context.rope.rows(section.full), context.documents)

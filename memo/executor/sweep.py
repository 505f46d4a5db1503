"""A transformer layer that is swept along the sequence under a swap plan: a slot holds a section of it.

Forward goes through the sections in order, backward in reverse order. In a section a layer works on fixed tiles, as in
`memo.executor.layer`, but one after the other from its input to its output: attention takes the queries of a tile and
all keys and values up to them, which stay on the device for the whole layer, or as far as windows reach
(memo.executor.key_values). So nothing but these, the sums of their gradients and the hidden states is as long as the
sequence; and the hidden states may be in host memory, from which they come section by section
(memo.executor.hidden_states). Context-parallel ranks share every tile (memo.parallel.zigzag) and meet in attention:
they gather the tile's keys and values, or exchange heads.

A layer that recomputes attention keeps nothing of its forward but the input (memo.executor.section_stream). Its
backward begins with a second forward, up to what slots keep, whose keys and values stay on the device if it holds those
of the whole sequence.

The hidden states are overwritten where they lie, and so are their gradients: the output of a tile takes the place of
its input, which is in the slot, and the gradient of the input that of the gradient of the output.

Bits: results depend on the tiles alone, not on what moves, nor on the number of tiles in a section. Attention is cut in
other blocks than that of whole layers, so they agree with those to rounding.

Shapes: as in memo.executor.tile_machine; c tokens of a section, sharded c / tp.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.attention.backends import Saved
from memo.executor.key_values import KeyValues
from memo.executor.layer_on_tiles import ExplicitLayer, LayerOnTiles
from memo.executor.pieces import GradientSink
from memo.executor.tile_machine import Context, Rope, Tile
from memo.parallel import context_sweep
from memo.parallel.hidden import Hidden, same_memory
from memo.program.kinds import Kind
from memo.spec.slots import SlotLayout


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
    """The context of one section."""

    rope: Rope | None
    documents: Any


class SweptLayer(LayerOnTiles):
    """Runs a plain layer section by section; in evaluation, without gradients, outside of the plan."""

    memory: SectionBuffers

    def __init__(
        self,
        layer: Any,  # a Layer that is an nn.Module
        kind: Kind,
        index: int,
        sections: list[Tile],
        tiles: list[Tile],
        layout: SlotLayout,
        memory: SectionBuffers,
        sink: GradientSink,
        tp_group: ProcessGroup | None,
        hidden: Hidden,
        recomputes_attention: bool = False,
    ) -> None:
        """`sections` divide the sequence, and `tiles` each section: their rows count from its beginning.

        `hidden` has the same sections.
        """
        super().__init__(layer, kind, layout, memory, sink, tp_group)
        self.index, self.sections, self.tiles, self.hidden = index, sections, tiles, hidden
        self.recomputes_attention = recomputes_attention
        self._carry: Tensor | None = None
        """From one tile to the next of a gated delta net, in backward its gradient; None at the first one, and between
        passes."""

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
        """Leaves each section's activations in its slot, from the inputs that the first forward has put by."""
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
        """One tile's keys and values go to the store, and its output of attention to the slot."""
        self.compute_qkv(kept, tile, positions)
        if self.kind.is_linear:
            self._carry_on(kept, section, tile, positions)
            return
        qkv, rows = self._tile_heads(kept, tile, positions), _rows(section, tile)
        own, before = self.memory.keys.own(rows), self.memory.keys.before(rows.stop)
        out = kept["attention_out"][tile.full].unflatten(-1, (-1, self.layer.attention.head_dim))
        core, sinks, first = self.layer.attention.core, self._sinks(), self.memory.keys.first_token
        lse = context_sweep.forward_rows(core, qkv, own, before, positions.documents, out, sinks, first)
        kept["lse"][tile.full].view(lse.shape).copy_(lse)

    def _carry_on(self, kept: dict[str, Tensor], section: Tile, tile: Tile, positions: _Positions) -> None:
        """As `_attend`, of a gated delta net."""
        carries, qkv, out = kept["carries"], kept["qkv"][tile.full], kept["attention_out"][tile.full]
        if self._carry is None:
            carries[tile.index].zero_()
        else:
            carries[tile.index].copy_(self._carry)
        core, start = self.layer.attention.core, self._first_token(section, tile)
        self._carry = core.forward(qkv, out, positions.documents, start, carries[tile.index])

    def _first_token(self, section: Tile, tile: Tile) -> int:
        """The place in the sequence of a tile's first token; context-parallel ranks share the tile."""
        return _rows(section, tile).start * self.memory.keys.layout.cp

    def _fetch_keys(self, section: Tile) -> None:
        """Those of the sections that a backward needs from this one on."""
        gathers_again = not self.recomputes_attention or self.memory.keys.layout.slides
        for fetched in self.memory.keys.begin("B", section.index):
            self.memory.take_keys(self.index, fetched)
            if gathers_again:
                self._gather_again(self.sections[fetched])

    def _gather_again(self, section: Tile) -> None:
        """Keys and values of a section, if those of this rank's tokens alone have come back from host memory."""
        for tile in self.tiles:
            rows = _rows(section, tile)
            own = self.memory.keys.own(rows)
            if own is not None:
                context_sweep.gather_rows(self.layer.attention.core, own, self.memory.keys.before(rows.stop))

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
        for parameter in self.layer.parameters():
            self.sink.gradient_done(parameter)
        return grad

    def _tile_backward(
        self, kept: dict[str, Tensor], section: Tile, tile: Tile, grad: Tensor, positions: _Positions
    ) -> None:
        """The rows of `grad` that are this tile's: of the output's gradient before, of the input's afterwards.

        A function of its own, so that no gradient of one tile lives until the next tile has another one.
        """
        if "qkv" not in self.kept_of(tile):
            self.compute_qkv(kept, tile, positions)
        rows = grad[tile.shard]
        grad_out = self._finish_backward(kept, tile, positions, rows, rows)
        grads = self._attention_backward(kept, section, tile, grad_out, positions)
        self._qkv_backward(kept, tile, positions, grads, rows, rows)

    def _attention_backward(
        self, kept: dict[str, Tensor], section: Tile, tile: Tile, grad_out: Tensor, positions: _Positions
    ) -> Any:
        """Gradients of the tile's q, k and v, or that of qkv of a gated delta net."""
        if self.kind.is_linear:
            given = (grad_out, kept["qkv"][tile.full], self.sink.main_gradient, positions.documents)
            carried = (self._first_token(section, tile), kept["carries"][tile.index], self._carry)
            of_qkv, self._carry = self.layer.attention.core.backward(*given, *carried)
            return of_qkv
        core, heads = self.layer.attention.core, (-1, self.layer.attention.head_dim)
        q, _, _ = self._tile_heads(kept, tile, positions)
        stop = _rows(section, tile).stop
        out, lse = kept["attention_out"][tile.full].unflatten(-1, heads), kept["lse"][tile.full]
        keys, values = self.memory.keys.before(stop).chunk(2, dim=2)
        saved, sums = Saved(q, keys, values, out, lse), self.memory.keys.sums_before(stop)
        sinks, grad_out = self._sinks(backward=True), grad_out.unflatten(-1, heads)
        first = self.memory.keys.first_token
        return context_sweep.backward_rows(core, grad_out, saved, sums, positions.documents, sinks, first)

    def _tile_heads(self, kept: dict[str, Tensor], tile: Tile, positions: _Positions) -> tuple[Tensor, Tensor, Tensor]:
        rope = None if positions.rope is None else positions.rope.rows(tile.full)
        return self._attention_inputs(kept["qkv"][tile.full], rope)


def _rows(section: Tile, tile: Tile) -> slice:
    """The rows of a tile among those of this context-parallel rank's tokens."""
    return slice(section.full.start + tile.full.start, section.full.start + tile.full.stop)


def _positions(section: Tile, context: Context) -> _Positions:
    return _Positions(None if context.rope is None else context.rope.rows(section.full), context.documents)

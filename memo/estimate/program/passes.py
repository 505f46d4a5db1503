"""Forward and backward passes of a layer, of the embedding and of the loss: what each keeps, and its peak.

A step has many layers and microbatches but few different passes, so each is counted once.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from memo.config import RunConfig
from memo.estimate.program.embedding_and_loss import (
    EndSizes,
    embedding_backward,
    embedding_forward,
    loss_backward,
    loss_forward,
    rope_table,
)
from memo.estimate.program.halves import halves_backward, halves_forward, recomputed_halves, unkept_halves
from memo.estimate.program.layer import layer_backward, layer_forward, recomputed_backward, unkept_forward
from memo.estimate.program.ledger import Block, Ledger, Moment
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tiles import Kept, swept_backward, swept_forward, tiled_backward, tiled_forward
from memo.program.kinds import Kind, kind_of


@dataclass(eq=False)
class Pass:
    """One pass.

    Attributes:
        start: the pass's own tensors before it: its input; in backward, what forward kept and the output's gradient.
        peak: all tensors at the moment at which they take most.
        tail: the same from the last weight gradient on, when the reduction of the module's gradients has started.
        end: the pass's own tensors after it; with a tail only.
    """

    start: Moment
    peak: Moment
    tail: Moment | None = None
    end: Moment | None = None

    @cached_property
    def transient(self) -> dict[str, int]:
        """Bytes by name at the peak less those at the start; negative for tensors that were freed before the peak."""
        return _change(self.start, self.peak)

    @cached_property
    def late(self) -> dict[str, int]:
        """Bytes by name at the worst moment of the tail less those at the end; none without a tail."""
        return {} if self.tail is None or self.end is None else _change(self.end, self.tail)

    @property
    def transient_bytes(self) -> int:
        return self.peak.num_bytes - self.start.num_bytes

    @property
    def late_bytes(self) -> int:
        return 0 if self.tail is None or self.end is None else self.tail.num_bytes - self.end.num_bytes


def _change(start: Moment, moment: Moment) -> dict[str, int]:
    change = Counter(moment.alive)
    change.subtract(start.alive)
    return dict(change)


@dataclass(frozen=True)
class LayerPasses:
    """Forward and backward of one layer on one rank.

    Attributes:
        between: tensors between forward and backward, without the output; the input only if it stays.
        keeps_input: whether the input stays.
        in_place: whether the output takes the place of the input, and the gradient of the input that of the output's.
        hidden_bytes: bytes of the input on the device; the output and the gradients of both have as many.
    """

    forward: Pass
    backward: Pass
    between: Moment
    keeps_input: bool
    in_place: bool
    hidden_bytes: int
    _record_held: Callable[[], Pass]

    @cached_property
    def held_backward(self) -> Pass:
        """The backward if the caller keeps the gradient of the output alive."""
        return self._record_held()

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes by name that are kept between forward and backward, without input and output."""
        return {name: num_bytes for name, num_bytes in self.between.alive.items() if name != "input"}

    @property
    def kept_bytes(self) -> int:
        """The sum of `kept`."""
        return self.between.num_bytes - (self.hidden_bytes if self.keeps_input else 0)


def layer_passes(config: RunConfig, z: LayerSizes, kept: Kept | None) -> LayerPasses:
    """The passes of one layer; `kept`: the values that a swap plan keeps whole, None without a swap plan."""
    return _layer_passes(z, kind_of(config.model), kept, config.memory.recompute_granularity == "full")


@lru_cache(maxsize=4096)
def _layer_passes(z: LayerSizes, kind: Kind, kept: Kept | None, recomputes: bool) -> LayerPasses:
    """Cached, because a search asks for the same few passes many times."""
    return _record_passes(_Execution(z, kind, kept, recomputes))


def _record_passes(execution: "_Execution") -> LayerPasses:
    z = execution.z
    hidden = z.between_layers
    ledger = Ledger(at="layer forward", never=z.never)
    x = ledger.make("input", hidden)
    before = ledger.now
    y, back, keeps_input = execution.forward(ledger, x)
    forward = Pass(before, ledger.peak)
    ledger.free(y)
    between = ledger.now

    def record_backward(ledger: Ledger, held: bool) -> Pass:
        grad = ledger.make("gradient", hidden)
        ledger.at = "layer backward"
        ledger.restart()
        start = ledger.now
        back(ledger, grad, held)
        tail = ledger.tail if execution.kept is None else None  # on tiles all gradients are done at the end
        return Pass(start, ledger.peak, tail, ledger.now)

    again = ledger.copy()
    backward = record_backward(ledger, held=False)

    def record_held() -> Pass:
        # On tiles the gradient of the output is never added to, so that nothing depends on who keeps it.
        return backward if execution.kept is not None else record_backward(again, held=True)

    return LayerPasses(forward, backward, between, keeps_input, y is x, hidden, record_held)


@dataclass(frozen=True)
class EndPasses:
    """Passes before and after the layers, for one microbatch on one rank.

    Attributes:
        rope, embedding, loss: the forwards that compute RoPE's table of all tokens, the first hidden states and the
            loss.
        loss_backward: writes the gradient of the last layer's output over that output.
        embedding_backward, held_embedding_backward: from the gradient of the first layer's input, while a tied head's
            gradient is kept; the second if that gradient is still held by the caller.
        rope_bytes, of_head_bytes: of RoPE's table and of a tied head's gradient; 0 where there is none.
        loss_kept: bytes by name between the loss and its backward, besides the hidden states.
    """

    rope: Pass
    embedding: Pass
    loss: Pass
    loss_backward: Pass
    embedding_backward: Pass
    held_embedding_backward: Pass
    rope_bytes: int
    of_head_bytes: int
    loss_kept: dict[str, int]


def end_passes(z: LayerSizes, ends: EndSizes, head_waits: bool) -> EndPasses:
    """The passes of a stage that has both embedding and head.

    `head_waits`: the gradient of a tied head is kept until that of the embedding is added to it.
    """
    # They do not depend on attention, nor on tiles but where layers are swept.
    alike = z._replace(ring=1, ring_rank=0, a2a=1, gathers_kv=False, recomputes_attention=False)
    return _end_passes(alike if z.sections else alike._replace(tiles=1), ends, head_waits)


@lru_cache(maxsize=4096)
def _end_passes(z: LayerSizes, ends: EndSizes, head_waits: bool) -> EndPasses:
    """Cached, as `_layer_passes`."""
    hidden = z.between_layers

    def record(work: Callable[[Ledger], _Made]) -> tuple[Pass, _Made]:
        ledger = Ledger(never=z.never)
        before = ledger.now
        made = work(ledger)
        return Pass(before, ledger.peak), made

    makes_table = z.rope and not z.sections  # a sweep makes one for each section
    rope, table = record(lambda ledger: rope_table(ledger, z).num_bytes if makes_table else 0)
    embedding, _ = record(lambda ledger: embedding_forward(ledger, z, ends))
    ledger = Ledger(never=z.never)
    ledger.make("input", hidden)
    start = ledger.now
    lse = loss_forward(ledger, z, ends)
    loss = Pass(start, ledger.peak)
    start = ledger.now
    ledger.restart()
    of_head = loss_backward(ledger, z, ends, lse)
    backward = Pass(start, ledger.peak, ledger.tail, ledger.now)
    of_head_bytes = of_head.num_bytes if of_head and head_waits else 0

    def embedding_pass(is_held: bool) -> Pass:
        ledger = Ledger(never=z.never)
        grad, waiting = ledger.make("gradient", hidden), ledger.make("head gradient", of_head_bytes)
        start = ledger.now
        embedding_backward(ledger, z, ends, None if is_held else grad, waiting)
        return Pass(start, ledger.peak)

    return EndPasses(
        rope,
        embedding,
        loss,
        backward,
        embedding_pass(is_held=False),
        embedding_pass(is_held=True),
        table,
        of_head_bytes,
        {lse.name: lse.num_bytes},
    )


_Made = TypeVar("_Made")
_Back = Callable[[Ledger, Block, bool], object]


@dataclass(frozen=True)
class _Execution:
    """How a run executes a layer: on tiles under a swap plan (`kept`), with full recomputation, or neither."""

    z: LayerSizes
    kind: Kind
    kept: Kept | None
    recomputes: bool

    def forward(self, ledger: Ledger, x: Block) -> tuple[Block, _Back, bool]:
        """(output, the backward, whether x is kept)."""
        z, kind, kept = self.z, self.kind, self.kept
        if kept is not None and z.sections:
            swept_forward(ledger, z, kind, kept)
            return x, lambda ledger, grad, held: swept_backward(ledger, z, kind, kept), False
        if kept is not None:
            y = tiled_forward(ledger, z, kind, kept, x)
            return y, lambda ledger, grad, held: tiled_backward(ledger, z, kind, kept, grad), False
        if z.halves is not None:
            return self._custom(ledger, x)
        if self.recomputes:
            y = unkept_forward(ledger, z)
            return y, lambda ledger, grad, held: recomputed_backward(ledger, z, x, grad, held=held), True
        y, here = layer_forward(ledger, z, x)
        return y, lambda ledger, grad, held: layer_backward(ledger, z, here, grad, held=held), here.x is not None

    def _custom(self, ledger: Ledger, x: Block) -> tuple[Block, _Back, bool]:
        z = self.z
        if self.recomputes:
            y = unkept_halves(ledger, z)
            return y, lambda ledger, grad, held: recomputed_halves(ledger, z, x, grad), True
        y, kept = halves_forward(ledger, z)

        def back(ledger: Ledger, grad: Block, held: bool) -> None:
            halves_backward(ledger, z, kept, grad)
            ledger.free(x)

        return y, back, True

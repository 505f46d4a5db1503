"""Forward and backward passes of a layer, of the embedding and of the loss: the tensors each keeps, and its peak.

A step has many layers and microbatches but few different passes, so each pass is counted once.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from memo.estimate.program.custom_layer import custom_layer_backward, custom_layer_forward
from memo.estimate.program.embedding_and_loss import (
    EndSizes,
    embedding_backward,
    embedding_forward,
    loss_backward,
    rope_table,
)
from memo.estimate.program.ledger import Block, Ledger, Pass, Snapshot
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tiles import (
    Kept,
    Residents,
    resident_backward,
    resident_forward,
    swept_backward,
    swept_forward,
    tiled_backward,
    tiled_forward,
)
from memo.program.kinds import Kind


@dataclass(frozen=True)
class LayerPasses:
    """Forward and backward of one layer on one rank.

    Attributes:
        between: tensors between forward and backward, without the output; the input only if it stays.
        keeps_input: whether the input stays.
        in_place: whether the output overwrites the input, and the input's gradient overwrites the output's gradient.
        hidden_bytes: bytes of the input on the device; the output and both gradients have the same size.
    """

    forward: Pass
    backward: Pass
    between: Snapshot
    keeps_input: bool
    in_place: bool
    hidden_bytes: int

    @cached_property
    def kept(self) -> dict[str, int]:
        """Bytes by name that are kept between forward and backward, without input and output."""
        return {name: num_bytes for name, num_bytes in self.between.alive.items() if name != "input"}

    @property
    def kept_bytes(self) -> int:
        """The sum of `kept`."""
        return self.between.num_bytes - (self.hidden_bytes if self.keeps_input else 0)

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """All bytes that a walk through a step reads, besides `hidden_bytes`."""
        backward = self.backward
        return self.kept_bytes, self.forward.transient_bytes, backward.transient_bytes, backward.late_bytes


@lru_cache(maxsize=4096)
def layer_passes(sizes: LayerSizes, kind: Kind, how: Kept | Residents | None) -> LayerPasses:
    """Return the passes of one layer that keeps `how` (`kept_by_layer`). Cached, because a search asks for the same few
    passes many times."""
    hidden = sizes.between_layers
    ledger = Ledger(at="layer forward", never=sizes.never)
    x = ledger.make("input", hidden)
    before = ledger.now
    y, back, keeps_input = _run_forward(ledger, sizes, kind, how, x)
    forward = Pass(before, ledger.peak)
    ledger.free(y)
    between = ledger.now
    grad = ledger.make("gradient", hidden)
    ledger.at = "layer backward"
    ledger.restart()
    start = ledger.now
    back(grad)
    tail = ledger.tail if how is None else None  # the executor's gradients are all done at the end
    backward = Pass(start, ledger.peak, tail, ledger.now)
    return LayerPasses(forward, backward, between, keeps_input, y is x, hidden)


def _run_forward(
    ledger: Ledger, sizes: LayerSizes, kind: Kind, how: Kept | Residents | None, x: Block
) -> tuple[Block, Callable[[Block], None], bool]:
    """Run the forward and return (output, backward, whether x is kept).

    `how` selects the executor: `Kept` under a swap plan, `Residents` without one, None for a custom layer under
    autograd. The backward takes the gradient of the output, and leaves the same bytes for the gradient of the input.
    """
    if isinstance(how, Residents):
        y, filled = resident_forward(ledger, sizes, kind, how, x)
        return y, lambda grad: resident_backward(ledger, sizes, kind, how, x, filled, grad), True
    if how is None:
        y, halves = custom_layer_forward(ledger, sizes)
        return y, lambda grad: custom_layer_backward(ledger, sizes, halves, x), True
    if sizes.sections:
        swept_forward(ledger, sizes, kind, how)
        return x, lambda grad: swept_backward(ledger, sizes, kind, how), False
    y = tiled_forward(ledger, sizes, kind, how, x)
    return y, lambda grad: tiled_backward(ledger, sizes, kind, how, grad), False


@dataclass(frozen=True)
class EndPasses:
    """Passes before and after the layers, for one microbatch on one rank.

    Attributes:
        rope, embedding: the forwards that compute RoPE's table of all tokens and the first hidden states.
        loss_backward: computes the loss, and overwrites the last layer's output with its gradient.
        embedding_backward, held_embedding_backward: backwards that start from the gradient of the first layer's input,
            while a tied head's gradient is kept; in the second, the caller still holds the input's gradient.
        rope_bytes, of_head_bytes: bytes of RoPE's table and of a tied head's gradient; 0 if there is none.
    """

    rope: Pass
    embedding: Pass
    loss_backward: Pass
    embedding_backward: Pass
    held_embedding_backward: Pass
    rope_bytes: int
    of_head_bytes: int

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """All bytes that a walk through a step reads."""
        forwards, backward = (self.rope, self.embedding), self.loss_backward
        passes = (*forwards, self.embedding_backward, self.held_embedding_backward, backward)
        sizes = self.rope_bytes, self.of_head_bytes
        return (*sizes, *(each.transient_bytes for each in passes), backward.late_bytes)


def end_passes(sizes: LayerSizes, ends: EndSizes, head_waits: bool) -> EndPasses:
    """Return the passes of a stage that has both embedding and head.

    `head_waits`: whether the gradient of a tied head is kept until the embedding's gradient is added to it.
    """
    # These passes do not depend on attention. They depend on tiles only if layers are swept.
    tiles = sizes.tiles if sizes.sections else 1
    return _end_passes(sizes._replace(ring=1, ring_rank=0, a2a=1, gathers_kv=False, tiles=tiles), ends, head_waits)


@lru_cache(maxsize=4096)
def _end_passes(sizes: LayerSizes, ends: EndSizes, head_waits: bool) -> EndPasses:
    """Cached for the same reason as `layer_passes`."""
    hidden = sizes.between_layers

    def record(work: Callable[[Ledger], _Made]) -> tuple[Pass, _Made]:
        ledger = Ledger(never=sizes.never)
        before = ledger.now
        made = work(ledger)
        return Pass(before, ledger.peak), made

    tables = 0 if sizes.sections else ends.rotations  # a sweep computes a table for each section
    rope, table = record(lambda ledger: sum(rope_table(ledger, sizes).num_bytes for _ in range(tables)))
    embedding, _ = record(lambda ledger: embedding_forward(ledger, sizes, ends))
    ledger = Ledger(never=sizes.never)
    ledger.make("input", hidden)
    start = ledger.now
    of_head = loss_backward(ledger, sizes, ends)
    backward = Pass(start, ledger.peak, ledger.tail, ledger.now)
    of_head_bytes = of_head.num_bytes if of_head and head_waits else 0

    def embedding_pass(is_held: bool) -> Pass:
        ledger = Ledger(never=sizes.never)
        grad, waiting = ledger.make("gradient", hidden), ledger.make("head gradient", of_head_bytes)
        start = ledger.now
        embedding_backward(ledger, sizes, ends, None if is_held else grad, waiting)
        return Pass(start, ledger.peak)

    return EndPasses(
        rope,
        embedding,
        backward,
        embedding_pass(is_held=False),
        embedding_pass(is_held=True),
        table,
        of_head_bytes,
    )


_Made = TypeVar("_Made")

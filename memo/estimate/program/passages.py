"""Passes through a layer and the model's ends as a whole, for whoever has many: what stays, and the worst moment."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeVar

from memo.config import RunConfig
from memo.estimate.program.ends import (
    EndSizes,
    embedding_backward,
    embedding_forward,
    loss_backward,
    loss_forward,
    rope_table,
)
from memo.estimate.program.layer import Kept, layer_backward, layer_forward, recomputed_backward, unkept_forward
from memo.estimate.program.ledger import Block, Ledger, Moment
from memo.estimate.program.matrices import hidden_bytes
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tiles import Slot, tiled_backward, tiled_forward


@dataclass(frozen=True)
class Passage:
    """One way through a layer.

    Attributes:
        start: the layer's own tensors before, bytes by name: its input, or what it kept and its output's gradient.
        peak: all of them at the worst moment.
    """

    start: dict[str, int]
    peak: Moment

    @cached_property
    def transient(self) -> dict[str, int]:
        """By name what the worst moment has beside the start; negative where it has less."""
        change = Counter(self.peak.alive)
        change.subtract(self.start)
        return dict(change)

    @cached_property
    def transient_bytes(self) -> int:
        return sum(self.transient.values())


@dataclass(frozen=True)
class LayerPassages:
    """Both ways through a layer on one rank.

    Attributes:
        backward, held_backward: the second where somebody else holds the gradient that comes in.
        kept: bytes by name that stay between forward and backward, without input and output.
        keeps_input: whether the input stays, too.
        hidden_bytes: of input, output and their gradients each.
    """

    forward: Passage
    backward: Passage
    held_backward: Passage
    kept: dict[str, int]
    keeps_input: bool
    hidden_bytes: int


def layer_passages(config: RunConfig, z: LayerSizes, slot: Slot | None) -> LayerPassages:
    """`slot`: what a swap plan keeps of every tile; None: no swap plan runs."""
    return _passages(z, slot, config.memory.recompute_granularity == "full")


@lru_cache(maxsize=4096)
def _passages(z: LayerSizes, slot: Slot | None, recomputes: bool) -> LayerPassages:
    """A search asks for the same few again and again."""
    ways = _Ways(z, slot, recomputes)
    hidden = hidden_bytes(z, z.tokens) // z.tp
    backwards = []
    for held in (False, True):
        ledger = Ledger(at="layer forward", never=z.never)
        x = ledger.make("input", hidden)
        y, back, keeps_input = ways.forward(ledger, x)
        forward = Passage({"input": hidden}, ledger.peak)
        ledger.free(y)
        kept = {name: num_bytes for name, num_bytes in ledger.alive.items() if name != "input"}
        grad = ledger.make("gradient", hidden)
        ledger.at = "layer backward"
        ledger.restart()
        start = ledger.alive
        back(grad, held)
        backwards.append(Passage(start, ledger.peak))
    return LayerPassages(forward, backwards[0], backwards[1], kept, keeps_input, hidden)


@dataclass(frozen=True)
class EndPassages:
    """Both ends of the model, for one microbatch on one rank.

    Attributes:
        rope, embedding, loss: what makes RoPE's table, the first hidden states, and the loss from the last ones.
        loss_backward, embedding_backward: to the gradient of the last layer's output; from that of the first one's
            input, with what a tied head's gradient has kept until then.
        rope_bytes, of_head_bytes: that table's, and that gradient's; 0 where there is none.
        loss_kept: bytes by name between the loss and its backward, without the hidden states.
        keeps_hidden: whether they stay, too.
    """

    rope: Passage
    embedding: Passage
    loss: Passage
    loss_backward: Passage
    embedding_backward: Passage
    rope_bytes: int
    of_head_bytes: int
    loss_kept: dict[str, int]
    keeps_hidden: bool


@lru_cache(maxsize=4096)
def end_passages(z: LayerSizes, ends: EndSizes, head_waits: bool) -> EndPassages:
    """Whether or not a stage has both; `head_waits`: a tied head's gradient is kept for the embedding's backward."""
    hidden = hidden_bytes(z, z.tokens) // z.tp

    def record(work: Callable[[Ledger], _Made]) -> tuple[Passage, _Made]:
        ledger = Ledger(never=z.never)
        made = work(ledger)
        return Passage({}, ledger.peak), made

    rope, table = record(lambda ledger: rope_table(ledger, z).num_bytes if z.rope else 0)
    embedding, _ = record(lambda ledger: embedding_forward(ledger, z, ends))
    ledger = Ledger(never=z.never)
    kept = loss_forward(ledger, z, ends, ledger.make("input", hidden))
    loss = Passage({"input": hidden}, ledger.peak)
    start = ledger.alive
    ledger.restart()
    grad, of_head = loss_backward(ledger, z, ends, kept)
    backward = Passage(start, ledger.peak)
    if not head_waits:
        ledger.free(of_head)
        of_head = None
    start = ledger.alive
    ledger.restart()
    embedding_backward(ledger, z, ends, grad, of_head)
    return EndPassages(
        rope,
        embedding,
        loss,
        backward,
        Passage(start, ledger.peak),
        table,
        of_head.num_bytes if of_head else 0,
        {name: num_bytes for name, num_bytes in backward.start.items() if name != "input"},
        kept.x is not None,
    )


_Made = TypeVar("_Made")
_Back = Callable[[Block, bool], Block]


@dataclass(frozen=True)
class _Ways:
    """How this run executes a layer."""

    z: LayerSizes
    slot: Slot | None
    recomputes: bool

    def forward(self, ledger: Ledger, x: Block) -> tuple[Block, _Back, bool]:
        """(output, its backward, whether x stays)."""
        z, slot = self.z, self.slot
        if slot is not None:
            return tiled_forward(ledger, z, slot, x), lambda grad, held: tiled_backward(ledger, z, slot, grad), False
        if self.recomputes:
            y = unkept_forward(ledger, z)
            return y, lambda grad, held: recomputed_backward(ledger, z, x, grad, held=held), True
        y, kept = layer_forward(ledger, z, x)
        return y, self._plain_back(ledger, kept), kept.x is not None

    def _plain_back(self, ledger: Ledger, kept: Kept) -> _Back:
        return lambda grad, held: layer_backward(ledger, self.z, kept, grad, held=held)

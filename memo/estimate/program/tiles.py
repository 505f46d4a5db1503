"""One layer under a swap plan, forward and backward, tensor by tensor, without its slots and its keys.

Layers whose slot holds all of them (memo.executor.layer), and layers that are swept along the sequence
(memo.executor.sweep). Tiles are alike, so one of them is walked through. In a sweep it is the last one, which has most
keys before it: hidden states and their gradients are overwritten where they lie, so a layer takes no more than this.
"""

from memo.config import RunConfig
from memo.estimate.program.attention import (
    attention_backward,
    attention_forward,
    gather_rows,
    rows_backward,
    rows_forward_placed,
)
from memo.estimate.program.embedding_and_loss import rope_table, rope_table_bytes
from memo.estimate.program.layer import normed_heads_forward
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import hidden_bytes
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tile_machine import TileLedger
from memo.estimate.program.tokenwise import rope_in_place
from memo.program.kinds import Kind
from memo.program.walk import backward, forward
from memo.spec.skeleton import moves_in_part, skeletal_tensors
from memo.spec.slots import WHOLE_GROUP, Moved, slot_dims

Kept = frozenset[str]
"""The values of which a slot holds all tiles. Others are rebuilt in some tile, whose backward needs most memory."""


def kept_values(config: RunConfig, moved: Moved) -> Kept:
    """What a slot holds of all tiles when `moved` moves."""
    tiles, policy = slot_dims(config).tiles, config.memory.offload_policy

    def moves_whole(group: str) -> bool:
        return moved >= 1 if isinstance(moved, int | float) else moved.get(group, 0) == tiles

    partly = (tensor for tensor in skeletal_tensors(config.model) if moves_in_part(tensor, policy))
    return frozenset(tensor.name for tensor in partly if moves_whole(tensor.group))


def tiled_forward(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept, x: Block) -> Block:
    """Output of the layer; x is freed."""
    tile = z.tokens // z.tiles
    _before(ledger, z, kind, kept, tile)
    q, k = _attention_inputs(ledger, z, z.tokens)
    _, lse = attention_forward(ledger, z, placed=True)
    ledger.free(lse, q, k)
    y = ledger.make("layer output", hidden_bytes(z, z.tokens) // z.tp)
    _after(ledger, z, kind, kept, tile)
    ledger.free(x)
    return y


def tiled_backward(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept, grad: Block) -> Block:
    """Gradient of the input; `grad` is freed."""
    tile = z.tokens // z.tiles
    if WHOLE_GROUP not in kept:
        _before(ledger, z, kind, kept, tile)
    grad_residual = ledger.make("residual gradient", grad.num_bytes)
    grad_out = ledger.make("output gradient", z.tokens * z.q * z.narrow)
    ledger.free(_after_backward(ledger, z, kind, kept, tile))
    q, k = _attention_inputs(ledger, z, z.tokens)
    grads = attention_backward(ledger, z)
    ledger.free(grad_out, q, k)
    grad_x = ledger.make("input gradient", grad.num_bytes)
    _before_backward(ledger, z, kind, kept, tile)
    ledger.free(grad_residual, *grads, grad)
    return grad_x


def swept_forward(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept) -> None:
    tile, before = _last_tile(z)
    table = _positions(ledger, z)
    _before(ledger, z, kind, kept, tile.tokens)
    q, k = _attention_inputs(ledger, z, tile.tokens)
    lse = rows_forward_placed(ledger, tile, before)
    ledger.free(lse, q, k)
    _after(ledger, z, kind, kept, tile.tokens)
    ledger.free(table)


def swept_backward(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept) -> None:
    tile, before = _last_tile(z)
    table = _positions(ledger, z)
    gather_rows(ledger, tile)
    if WHOLE_GROUP not in kept:
        _before(ledger, z, kind, kept, tile.tokens)
    grad_out = _after_backward(ledger, z, kind, kept, tile.tokens)
    q, k = _attention_inputs(ledger, z, tile.tokens)
    ledger.free(k)  # it is in the store already
    grads = rows_backward(ledger, tile, before)
    ledger.free(q)
    _before_backward(ledger, z, kind, kept, tile.tokens)
    ledger.free(*grads, grad_out, table)


def _last_tile(z: LayerSizes) -> tuple[LayerSizes, int]:
    """This rank's sizes of it, and the number of tokens of all context-parallel ranks before it."""
    tokens = z.tokens // z.tiles
    return z._replace(tokens=tokens), (z.tokens - tokens) * z.ring * z.a2a


def _positions(ledger: Ledger, z: LayerSizes) -> Block | None:
    """RoPE's table of a section, which is made while that of the section before is still there."""
    if not z.rope:
        return None
    section = z._replace(tokens=z.tokens // z.sections)
    last = ledger.make("rope table", rope_table_bytes(section)) if z.sections > 1 else None
    table = rope_table(ledger, section)
    ledger.free(last)
    return table


def _before(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept, tokens: int) -> None:
    TileLedger(ledger, z, tokens, {WHOLE_GROUP}).run(forward(kind.before, frozenset({kind.attended}), kept))


def _after(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept, tokens: int) -> None:
    TileLedger(ledger, z, tokens, {"layer_output", *kept}).run(forward(kind.after, frozenset({"layer_output"}), kept))


def _after_backward(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept, tokens: int) -> Block | None:
    """The gradient of attention's output."""
    walk, machine = backward(kind.after, kept, frozenset({"layer_output"})), TileLedger(ledger, z, tokens)
    machine.run(walk.steps)
    return machine.live[walk.gradients["attention_out"]]


def _before_backward(ledger: Ledger, z: LayerSizes, kind: Kind, kept: Kept, tokens: int) -> None:
    walk = backward(kind.before, kept | {WHOLE_GROUP}, frozenset({"heads", "input"}))
    TileLedger(ledger, z, tokens).run(walk.steps)


def _attention_inputs(ledger: Ledger, z: LayerSizes, tokens: int) -> tuple[Block | None, Block | None]:
    """q and k of these tokens if they are normed; else the slot holds them."""
    heads = normed_heads_forward(ledger, z, tokens, graph=False)
    if z.rope and z.qk_norm:
        rope_in_place(ledger, z, tokens)
    return heads.q, heads.k

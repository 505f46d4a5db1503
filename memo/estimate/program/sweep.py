"""A layer that is swept along the sequence (memo.executor.sweep), tensor by tensor, without its slots and its keys.

Hidden states and their gradients are overwritten where they lie, so a layer takes no more than its last tile, which has
most keys before it; if not all tiles of a group move, that tile is among those that are recomputed.
"""

from memo.estimate.program.attention import gather_rows, rows_backward, rows_forward_placed
from memo.estimate.program.embedding_and_loss import rope_table, rope_table_bytes
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tiles import (
    KeptGroups,
    attention_inputs,
    compute_qkv,
    mlp_backward,
    mlp_forward,
    qkv_backward,
)


def swept_forward(ledger: Ledger, z: LayerSizes, groups: KeptGroups) -> None:
    tile, before = _last_tile(z)
    table = _positions(ledger, z)
    compute_qkv(ledger, z, tile.tokens)
    q, k = attention_inputs(ledger, z, tile.tokens)
    lse = rows_forward_placed(ledger, tile, before)
    ledger.free(lse, q, k)
    mlp_forward(ledger, z, groups, tile.tokens)
    ledger.free(table)


def swept_backward(ledger: Ledger, z: LayerSizes, groups: KeptGroups) -> None:
    tile, before = _last_tile(z)
    table = _positions(ledger, z)
    gather_rows(ledger, tile)
    if not groups.qkv:
        compute_qkv(ledger, z, tile.tokens)
    grad_out = mlp_backward(ledger, z, groups, tile.tokens)
    q, k = attention_inputs(ledger, z, tile.tokens)
    ledger.free(k)  # it is in the store already
    grads = rows_backward(ledger, tile, before)
    ledger.free(q)
    qkv_backward(ledger, z, tile.tokens)
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

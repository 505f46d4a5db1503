"""Context-parallel attention of one tile, where layers are swept along the sequence (memo.executor.sweep).

All ranks work on the same tile at one time. Its queries attend to the keys and values of the tile and of all tokens
before it, or as far back as a window reaches. Each rank stores these keys and values in the order of positions, from
token `first` of the sequence up to the tile's end. A ring would pass all of them round again for each tile, so only
"all_gather" and "a2a" run in a sweep.

Legend: as in memo.parallel.context; t tokens from `first` up to the tile's end, s tokens of the tile on this rank.
Stores of keys and values are [t, b, 2 n_kv / A, d]: the keys of a token, then its values.
"""

import torch
from torch import Tensor

from memo.attention.backends import Saved
from memo.attention.blocks import Chunk, Documents, Scores, attention_blocks, cut_keys
from memo.attention.core import GradSums
from memo.attention.sinks import Sinks
from memo.parallel.collectives import all_gather, reduce_scatter
from memo.parallel.context import ContextAttention
from memo.parallel.zigzag import natural_from_zigzag, zigzag_chunks, zigzag_from_natural
from memo.spec.sweep import BACKWARD_KEYS_PER_QUERY


def forward_rows(
    core: ContextAttention,
    qkv: tuple[Tensor, Tensor, Tensor],
    own: Tensor | None,
    before: Tensor,
    documents: Documents | None,
    out: Tensor,
    sinks: Sinks | None = None,
    first: int = 0,
) -> Tensor:
    """Compute attention for this rank's tokens of a tile; returns lse, which `backward_rows` takes.

    Args:
        qkv: [s, b, n, d] and twice [s, b, n_kv, d].
        own: [s, b, 2 n_kv, d], receives this rank's keys and values, which `gather_rows` reads; None if nothing is
            gathered.
        before: the store; receives the tile's keys and values in its last rows.
        out: [s, b, n, d], receives the output.
    """
    q, k, v = core.split_heads(*qkv) if core.a2a_size > 1 else qkv
    kept = before[-q.shape[0] :] if own is None else own
    own_keys, own_values = kept.chunk(2, dim=2)
    own_keys.copy_(k)
    own_values.copy_(v)
    if own is not None:
        gather_rows(core, own, before)
    keys, values = before.chunk(2, dim=2)
    place = out if core.a2a_size == 1 else None
    found, lse = core.attend(q, keys, values, rows_scores(core, q, keys, documents, first), place)
    if sinks is not None:
        sinks.part(core.a2a_rank, core.a2a_size).join_(found, lse)
    if core.a2a_size > 1:
        given = [found]
        del q, k, v, found  # before the exchange makes copies
        core.join_heads(given, out=out)
    return lse


def gather_rows(core: ContextAttention, own: Tensor, before: Tensor) -> None:
    """Gather the keys and values of a tile: `own` of all ranks -> the last rows of `before`, in order of positions."""
    tile = before[-core.ring_size * own.shape[0] :]
    natural_from_zigzag(all_gather(own, core.ring), core.ring_size, tile)


def backward_rows(
    core: ContextAttention,
    grad_out: Tensor,
    saved: Saved,
    sums: Tensor,
    documents: Documents | None,
    sinks: Sinks | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this rank's q, k and v of a tile, in the shapes of `qkv`; call the last tile first.

    Args:
        saved: q, out and lse (in any shape) of `forward_rows`, and as k and v the two halves of `before`.
        sums: sums of the gradients of `before`, in its shape and in the wide dtype, to which the tile's queries add.
            The sums for the tile's own rows are then complete, because no query of an earlier tile reads these keys.
    """
    q, k, v, out, lse = saved
    if core.a2a_size > 1:
        grad_out, q, out = core.split_heads(grad_out, q, out)
    saved = Saved(q, k, v, out, lse.view(q.shape[1], q.shape[2], q.shape[0]))
    dtype, tokens = q.dtype, q.shape[0]
    if sinks is not None:
        sinks.part(core.a2a_rank, core.a2a_size).backward(grad_out, out, saved.lse)
    dq_sum = torch.zeros(q.shape, dtype=sums.dtype, device=q.device)
    scores = cut_keys(rows_scores(core, q, k, documents, first), BACKWARD_KEYS_PER_QUERY * tokens)
    with core.around():
        GradSums(dq_sum, *sums.chunk(2, dim=2)).add(core.backend, grad_out, saved, scores, core.scale)
    dq = dq_sum.to(dtype)
    del dq_sum, grad_out, q, out, saved  # before the exchange makes copies
    own = sums[-core.ring_size * tokens :]
    if core.ring_size > 1:
        own = reduce_scatter(zigzag_from_natural(own, core.ring_size), core.ring)
    given = [dq, *own.to(dtype).chunk(2, dim=2)]
    del dq
    if core.a2a_size > 1:
        given = [*core.join_heads(given)]
    dq, dk, dv = given
    return dq, dk, dv


def rows_scores(core: ContextAttention, q: Tensor, k: Tensor, documents: Documents | None, first: int = 0) -> Scores:
    """Cut into blocks the scores of a tile's queries with all keys, of which the tile's own come last.

    All queries attend to the tokens before the tile in the same blocks, because kernels are slow with few queries. The
    strips of a window begin where documents do, so the blocks do not depend on how far back the keys go.
    """
    if core.window is not None and documents is None:
        documents = ((0, core.seq_length),)
    length, size = q.shape[0] * core.ring_size, core.ring_size
    row = k.shape[0] - length
    start = first + row
    queries = tuple(c._replace(start=start + c.start) for c in zigzag_chunks(length, size, core.ring_rank))
    before, tile = Chunk(first, row, 0), Chunk(start, length, row)
    if size == 1 or not row:
        return attention_blocks(queries, (before, tile), documents, core.window)
    parts = (attention_blocks(queries, (keys,), documents, core.window) for keys in (tile, before))
    return Scores(tuple(block for part in parts for block in part.blocks), core.window)

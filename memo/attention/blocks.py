"""Cuts the score matrix of causal attention inside documents into blocks that kernels accept (pure Python).

A rank's queries and its keys may be different lists of chunks of the sequence. Kernels accept only two shapes: a full
rectangle, and a causal square, whose rows and columns are the same tokens and whose lower triangle counts. This module
cuts the scores of two lists of chunks into as few blocks as possible:

            k: doc 0    doc 1
    q doc 0   \\ .         .         \\ = causal square
    q doc 1   .          \\          # = full rectangle
    q doc 1   .          # \\

Under a sliding window (memo.spec.window) the tokens of a document are cut into strips as long as the window. Queries
attend to the keys of their own strip, and to the later keys of the strip before it. In that second square the upper
triangle counts; it becomes a causal square if the tokens of both sides are taken in reverse order ("flipped").
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, islice, pairwise
from typing import NamedTuple

from memo.spec.attention_workspace import MOST_DOCUMENTS
from memo.spec.reach import parts
from memo.spec.window import strips_of_calls

Documents = tuple[tuple[int, ...], ...]
"""Cumulative document boundaries, a tuple per batch row: (0, ..., sequence length), ascending."""


class Chunk(NamedTuple):
    """Global token positions [start, start + length), which are the local rows [row, row + length)."""

    start: int
    length: int
    row: int

    @property
    def stop(self) -> int:
        return self.start + self.length


class ScoreBlock(NamedTuple):
    """Local q rows [q_start, q_stop) x local k rows [k_start, k_stop), for one batch row, or for all (None).

    ``causal``: both sides have the same number of tokens, and only the lower triangle counts; the tokens are the same
    on both sides unless ``flipped``. ``flipped``: both sides are taken in reverse order, so the upper triangle counts.
    """

    batch: int | None
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    causal: bool
    flipped: bool = False


@dataclass(frozen=True)
class Scores:
    """Blocks that cover each score once, and the window that they are made for; None: all earlier tokens."""

    blocks: tuple[ScoreBlock, ...]
    window: int | None = None


class _Span(NamedTuple):
    """Global positions [start, stop) of one document."""

    start: int
    stop: int

    def clip(self, chunk: Chunk) -> _Span:
        return _Span(max(self.start, chunk.start), min(self.stop, chunk.stop))


@lru_cache(maxsize=256)  # every layer of a step asks for the same blocks
def attention_blocks(
    q_chunks: tuple[Chunk, ...], k_chunks: tuple[Chunk, ...], documents: Documents | None, window: int | None = None
) -> Scores:
    """Return the blocks for the queries in ``q_chunks`` and the keys in ``k_chunks``; they cover each score once.

    ``documents`` holds one tuple of boundaries per batch row; None means that each row is a single document. A query
    attends to at most ``window`` tokens, itself included.
    """
    q_chunks, k_chunks = coalesce(q_chunks), coalesce(k_chunks)
    rows: Iterable[tuple[int | None, tuple[int, ...] | None]] = enumerate(documents or ())
    if documents is None or len(set(documents)) == 1:
        rows = [(None, None if documents is None else documents[0])]
    found = (_row_blocks(batch, q_chunks, k_chunks, boundaries, window) for batch, boundaries in rows)
    return Scores(tuple(chain.from_iterable(found)), window)


def coalesce(chunks: tuple[Chunk, ...]) -> tuple[Chunk, ...]:
    """Drop empty chunks and join neighbours that are contiguous both globally and locally."""
    joined: list[Chunk] = []
    for chunk in chunks:
        if chunk.length == 0:
            continue
        if joined and joined[-1].stop == chunk.start and joined[-1].row + joined[-1].length == chunk.row:
            last = joined.pop()
            chunk = Chunk(last.start, last.length + chunk.length, last.row)
        joined.append(chunk)
    return tuple(joined)


def cut_keys(scores: Scores, most_keys: int) -> Scores:
    """Return the same scores in blocks of at most `most_keys` keys; causal squares stay whole."""
    cut: list[ScoreBlock] = []
    for block in scores.blocks:
        if block.causal:
            cut.append(block)
            continue
        for start in range(block.k_start, block.k_stop, most_keys):
            cut.append(block._replace(k_start=start, k_stop=min(start + most_keys, block.k_stop)))
    return replace(scores, blocks=tuple(cut))


def demanding_packings(seq_length: int, batch: int, call_tokens: int) -> tuple[Documents, ...]:
    """Packings of `batch` rows, one of which makes attention request as much memory as any packing does.

    `call_tokens`: the maximum number of tokens in a causal square of one rank. The packings, and the reason for each:

      one document            the most queries and keys in a call, and the most sums of dq in a deterministic
                              FlashAttention 2, which needs fewer for more documents
      a short document, then  the kernel's gradients for the long document are alive together with the sums to which
      a long one              they are added, and with the gradients for the short document
      as many documents as    each document has rows of its own in the workspace, which are rounded up
      one call takes

    The short document has 64 tokens if samples are long, because not every kernel is known to accept 1 token. So the
    long document of a real packing may be 0.1 % longer. With several ranks in a ring, the calls of other packings may
    allocate in a different order, and need a little more memory.
    """
    short = max(1, min(64, seq_length // 1024))
    of_a_call = range(0, seq_length, -(-call_tokens // MOST_DOCUMENTS))
    packings = ((0, seq_length), (0, short, seq_length), (*of_a_call, seq_length))
    return tuple((packing,) * batch for packing in packings)


def cut_within(scores: Scores, most_tokens: int) -> Scores:
    """Return the same scores in blocks of at most `most_tokens` queries and `most_tokens` keys (memo.spec.reach)."""
    return replace(scores, blocks=tuple(part for block in scores.blocks for part in _parts(block, most_tokens)))


def _parts(block: ScoreBlock, most_tokens: int) -> Iterator[ScoreBlock]:
    queries, keys = block.q_stop - block.q_start, block.k_stop - block.k_start
    if max(queries, keys) <= most_tokens:
        yield block
        return
    for q_start, q_stop, k_start, k_stop, causal in parts(queries, keys, block.causal, most_tokens):
        if block.flipped:
            q_start, q_stop, k_start, k_stop = queries - q_stop, queries - q_start, keys - k_stop, keys - k_start
        yield ScoreBlock(
            block.batch,
            block.q_start + q_start,
            block.q_start + q_stop,
            block.k_start + k_start,
            block.k_start + k_stop,
            causal,
            block.flipped and causal,
        )


def grouped(
    blocks: Iterable[ScoreBlock], continues: Callable[[list[ScoreBlock], ScoreBlock], bool]
) -> Iterator[list[ScoreBlock]]:
    """Group consecutive blocks: a block that does not continue the last group begins a new group."""
    group: list[ScoreBlock] = []
    for block in blocks:
        if group and not continues(group, block):
            yield group
            group = []
        group.append(block)
    if group:
        yield group


def strips(scores: Scores, most_tokens: int) -> Iterator[list[ScoreBlock]]:
    """Group the blocks of a window for kernel calls (memo.spec.window): equal squares at equal distances form a group,
    and each rectangle is a group of its own."""
    for alike in grouped(scores.blocks, _continues):
        rest = iter(alike)
        for number in strips_of_calls(len(alike), max(scores.window or 1, step_of(alike)), most_tokens):
            yield list(islice(rest, number))


def step_of(group: list[ScoreBlock]) -> int:
    """Tokens from the beginning of one square of a group to the beginning of the next; 1 for a single square."""
    return group[1].q_start - group[0].q_start if len(group) > 1 else 1


def _continues(group: list[ScoreBlock], block: ScoreBlock) -> bool:
    first, last = group[0], group[-1]
    size, step = first.q_stop - first.q_start, block.q_start - last.q_start
    return (
        first.causal
        and block.causal
        and (first.batch, first.flipped, size) == (block.batch, block.flipped, block.q_stop - block.q_start)
        and step == block.k_start - last.k_start >= size
        and (len(group) == 1 or step == step_of(group))
    )


def _row_blocks(
    batch: int | None,
    q_chunks: tuple[Chunk, ...],
    k_chunks: tuple[Chunk, ...],
    boundaries: tuple[int, ...] | None,
    window: int | None,
) -> list[ScoreBlock]:
    if window is None and q_chunks == k_chunks and _is_monotone(q_chunks):
        return list(_diagonal_blocks(batch, q_chunks, boundaries))
    blocks = [b for q in q_chunks for k in k_chunks for b in _pair_blocks(batch, q, k, boundaries, window)]
    squares = [block for block in blocks if block.causal]
    return [*sorted(squares, key=lambda block: block.flipped), *_merge([block for block in blocks if not block.causal])]


def _is_monotone(chunks: tuple[Chunk, ...]) -> bool:
    """Whether local rows are consecutive and in the order of positions, as in a zigzag pair."""
    return all(a.stop <= b.start and a.row + a.length == b.row for a, b in pairwise(chunks))


def _diagonal_blocks(
    batch: int | None, chunks: tuple[Chunk, ...], boundaries: tuple[int, ...] | None
) -> Iterator[ScoreBlock]:
    """One causal square for each document.

    As the chunks are in order, the rows of a document are consecutive even if it spans several chunks.
    """
    if not chunks:
        return
    first, last = chunks[0], chunks[-1]
    cuts = {first.row, last.row + last.length}
    if boundaries is not None:
        for chunk in chunks:
            inside = boundaries[bisect_left(boundaries, chunk.start) : bisect_right(boundaries, chunk.stop)]
            cuts.update(chunk.row + position - chunk.start for position in inside)
        # A document may also end in the gap between two chunks.
        cuts.update(
            b.row
            for a, b in pairwise(chunks)
            if bisect_right(boundaries, a.stop - 1) != bisect_right(boundaries, b.start)
        )
    for start, stop in pairwise(sorted(cuts)):
        yield ScoreBlock(batch, start, stop, start, stop, True)


def _pair_blocks(
    batch: int | None, q: Chunk, k: Chunk, boundaries: tuple[int, ...] | None, window: int | None
) -> Iterator[ScoreBlock]:
    """Blocks of one pair of chunks; without a window, chunks that do not overlap have at most one."""
    q_shift, k_shift = q.row - q.start, k.row - k.start
    for document in _documents_of_both(q, k, boundaries):
        rows, columns = document.clip(q), document.clip(k)
        found = _triangle(rows, columns) if window is None else _band(document.start, rows, columns, window)
        for (q_start, q_stop), (k_start, k_stop), causal, flipped in found:
            yield ScoreBlock(
                batch, q_start + q_shift, q_stop + q_shift, k_start + k_shift, k_stop + k_shift, causal, flipped
            )


_Piece = tuple[_Span, _Span, bool, bool]
"""Positions of queries and of keys, whether the block is causal, and whether it is flipped."""


def _triangle(rows: _Span, columns: _Span) -> Iterator[_Piece]:
    """Pieces for every query with all keys that are not after it."""
    # Keys before the first query: every query attends to them.
    before = _Span(columns.start, min(columns.stop, rows.start))
    if before.start < before.stop:
        yield rows, before, False, False
    # The tokens on both sides, then the queries after these tokens; no query attends to later keys.
    shared = _Span(max(rows.start, columns.start), min(rows.stop, columns.stop))
    if shared.start < shared.stop:
        yield shared, shared, True, False
        if shared.stop < rows.stop:
            yield _Span(shared.stop, rows.stop), shared, False, False


def _band(origin: int, rows: _Span, columns: _Span, window: int) -> Iterator[_Piece]:
    """Pieces for every query with the last `window` tokens, itself included; strips begin at `origin`."""
    first, last = (rows.start - origin) // window, (rows.stop - 1 - origin) // window
    # A query's keys lie in its own strip or in the strip before it.
    first = max(first, (columns.start - origin) // window)
    last = min(last, (columns.stop - 1 - origin) // window + 1)
    for start in range(origin + first * window, origin + last * window + 1, window):
        queries = _Span(max(rows.start, start), min(rows.stop, start + window))
        own = _Span(max(columns.start, start), min(columns.stop, queries.stop))
        if own.start < own.stop:
            yield from _triangle(queries, own)
        earlier = _Span(max(columns.start, start - window), min(columns.stop, start))
        if earlier.start < earlier.stop:
            yield from _upper_triangle(queries, earlier, window)


def _upper_triangle(queries: _Span, keys: _Span, window: int) -> Iterator[_Piece]:
    """Pieces for queries of one strip with keys of the strip before it that are less than `window` tokens back."""
    reach = _Span(keys.start + window, keys.stop + window)  # for each key, the first query that is too far from it
    early = _Span(queries.start, min(queries.stop, reach.start))
    if early.start < early.stop:
        yield early, keys, False, False
    start, stop = max(queries.start, reach.start), min(queries.stop, reach.stop)
    if start + 1 < stop:
        yield _Span(start, stop - 1), _Span(start + 1 - window, stop - window), True, True
    if start < stop < reach.stop:
        yield _Span(start, stop), _Span(stop - window, keys.stop), False, False


def _documents_of_both(q: Chunk, k: Chunk, boundaries: tuple[int, ...] | None) -> Iterator[_Span]:
    """Documents with tokens in both chunks, found by bisection: a long sequence can pack thousands."""
    low, high = max(q.start, k.start), min(q.stop, k.stop)
    if boundaries is None:
        yield _Span(min(q.start, k.start), max(q.stop, k.stop))
        return
    if low < high:
        first, last = bisect_right(boundaries, low), bisect_right(boundaries, high - 1)
    else:
        # If the chunks are disjoint, only the document at the end of the first one can have tokens in the other.
        first, last = bisect_right(boundaries, high - 1), bisect_right(boundaries, low)
        if first != last:
            return
    for i in range(first, last + 1):
        yield _Span(boundaries[i - 1], boundaries[i])


def _merge(blocks: list[ScoreBlock]) -> list[ScoreBlock]:
    """Join full rectangles that share one side and touch along the other: fewer kernel calls."""
    tall: list[ScoreBlock] = []
    for block in sorted(blocks, key=lambda x: (x.k_start, x.k_stop, x.q_start)):
        last = tall[-1] if tall else None
        if last and last[3:5] == block[3:5] and last.q_stop == block.q_start:
            block = tall.pop()._replace(q_stop=block.q_stop)
        tall.append(block)
    wide: list[ScoreBlock] = []
    for block in sorted(tall, key=lambda x: (x.q_start, x.q_stop, x.k_start)):
        last = wide[-1] if wide else None
        if last and last[1:3] == block[1:3] and last.k_stop == block.k_start:
            block = wide.pop()._replace(k_stop=block.k_stop)
        wide.append(block)
    return wide

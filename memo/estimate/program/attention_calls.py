"""The calls of attention's kernel on one context-parallel rank, in the order in which they are made."""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from memo.estimate.program.sizes import LayerSizes
from memo.spec.reach import most_tokens, parts
from memo.spec.window import ring_steps, strips_of_calls


class Call(NamedTuple):
    """One call of the kernel: numbers of queries and keys, over all sequences of the micro-batch.

    Attributes:
        strip: tokens of a strip if the sequences of the call are equal strips of a window; else 0.
        flipped: whether queries and keys are copies in reverse order.
    """

    queries: int
    keys: int
    causal: bool = False
    strip: int = 0
    flipped: bool = False

    def shape(self, batch: int) -> tuple[int, int, int]:
        """Return the sequences of the call, and the queries and keys of each, given `batch` sequences a micro-batch."""
        sequences = self.queries // self.strip if self.strip else batch
        return sequences, self.queries // sequences, self.keys // sequences


def rows_calls(sizes: LayerSizes, before: int) -> list[Call]:
    """Return the calls within a tile, then a call of all its queries with the tokens before the tile."""
    if sizes.window and before:
        return window_calls(sizes, reach_back=True)
    within = [Call(sizes.tokens, sizes.tokens, causal=True)] if sizes.ring == 1 else gathered_calls(sizes)
    return [*within, *([Call(sizes.tokens, before)] if before else [])]


def short_calls(calls: list[Call], most_keys: int) -> Iterator[Call]:
    """Cut `calls` to at most `most_keys` keys; two of the equal calls are enough to show how much lives at once."""
    for call in calls:
        if call.causal:
            yield call
            continue
        whole, rest = divmod(call.keys, most_keys)
        yield from min(whole, 2) * [call._replace(keys=most_keys)]
        if rest:
            yield call._replace(keys=rest)


def within_reach(sizes: LayerSizes, calls: Iterable[Call], row: int) -> Iterator[Call]:
    """Cut `calls` to the reach of kernels; the widest rows are `row` elements apart.

    Three equal calls in a row are enough to show how much lives at once; all calls would be quadratic in the length.
    """
    most = sizes.batch * most_tokens(row)

    def few(tokens: int) -> int:
        whole, rest = divmod(tokens, most)
        return min(whole, 3) * most + rest

    for call in calls:
        if max(call.queries, call.keys) <= most:
            yield call
            continue
        for part in parts(few(call.queries), few(call.keys), call.causal, most):
            yield Call(part.q_stop - part.q_start, part.k_stop - part.k_start, part.causal)


def fused_row(sizes: LayerSizes) -> int:
    """Return the elements between two tokens of q, k and v, which are views of one tensor."""
    return sizes.batch * sizes.qkv


def different_steps(sizes: LayerSizes) -> list[int]:
    """Return the last step of a ring, and two steps of each kind: enough to show how much lives at once."""
    steps = ring_steps(sizes.tokens // sizes.batch * sizes.ring, sizes.ring, sizes.window or None)
    return [step for step in steps if step < 3 or 0 < step - sizes.ring_rank < 3 or step == steps[-1]]


def ring_calls(sizes: LayerSizes, step: int) -> list[Call]:
    """Return the calls of a step in zigzag order.

    The own block is causal. All queries attend to the first half of an earlier rank's keys; only the second half of the
    queries attends to a later rank's keys."""
    if step == 0:
        return window_calls(sizes, joined=True) if sizes.window else [Call(sizes.tokens, sizes.tokens, causal=True)]
    if sizes.window:  # a window reaches only into the neighbours of a chunk
        edge = min(sizes.window * sizes.batch, sizes.tokens // 2)
        return [Call(edge, edge)]
    return [Call(sizes.tokens, sizes.tokens // 2) if step <= sizes.ring_rank else Call(sizes.tokens // 2, sizes.tokens)]


def window_calls(sizes: LayerSizes, reach_back: bool = False, joined: bool = False) -> list[Call]:
    """Return the calls for the strips (memo.attention.blocks.strips): each call for the first two rows of the batch, or
    all calls for one row if documents are packed, as then the calls of one row follow each other.

    Two of the equal calls are enough to show how much lives at once. `reach_back`: whether a strip precedes the first
    one, as in a tile of a sweep. `joined`: whether keys are in the order of the queries, so that one call takes the
    strips of both chunks of a rank.
    """
    chunks = 1 if _is_last(sizes) else 2
    tokens = sizes.tokens // sizes.batch // chunks
    full, rest = divmod(tokens, sizes.window)
    rows = 1 if sizes.packed else min(2, sizes.batch)
    calls = []
    for strip, last, flipped in ((sizes.window, rest, False), (sizes.window - 1, rest - 1, True)):
        at_once = chunks if joined and not flipped else 1
        whole = at_once * (full if reach_back or not flipped else max(0, full - 1))
        numbers = strips_of_calls(whole if strip else 0, sizes.window, most_tokens(fused_row(sizes)))
        few = numbers[:2] + [number for number in numbers[2:][-1:] if number != numbers[0]]
        for number, size in (*((number, strip) for number in few), (at_once, last)):
            calls += rows * [Call(number * size, number * size, True, size, flipped)] if size > 0 else []
    return calls + ([Call(rest * sizes.batch, (sizes.window - rest) * sizes.batch)] if rest else [])


def gathered_calls(sizes: LayerSizes) -> list[Call]:
    """Return a causal call for each of the two chunks, then for each chunk a call with all keys before it."""
    if sizes.window:
        return window_calls(sizes, reach_back=True)
    chunk, rank = sizes.tokens // 2, sizes.ring_rank
    if _is_last(sizes):
        return [Call(sizes.tokens, sizes.tokens, causal=True), Call(sizes.tokens, chunk * rank)]
    before = [Call(chunk, chunk * count) for count in (rank, 2 * sizes.ring - 1 - rank) if count]
    return [Call(chunk, chunk, causal=True), Call(chunk, chunk, causal=True), *before]


def _is_last(sizes: LayerSizes) -> bool:
    """Whether this is the last rank of a ring, whose two chunks are neighbours; a rank alone has all tokens."""
    return sizes.ring_rank == sizes.ring - 1

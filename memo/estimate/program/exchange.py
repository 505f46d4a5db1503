"""Requests of the exchange of heads between context-parallel ranks (memo.parallel.context).

After the first all-to-all each rank has all tokens of some heads."""

from collections.abc import Iterable

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes


def exchanged(sizes: LayerSizes) -> LayerSizes:
    """Return the sizes between the two all-to-alls: all tokens of the group, for a part of the heads."""
    return sizes._replace(
        tokens=sizes.tokens * sizes.a2a, heads=sizes.heads // sizes.a2a, kv_heads=sizes.kv_heads // sizes.a2a
    )


def split_heads(ledger: Ledger, num_bytes: int) -> Block:
    packed = ledger.make("heads to send", num_bytes)
    received = ledger.make("heads received", num_bytes)
    ledger.free(packed)
    ordered = ledger.make("heads", num_bytes)
    ledger.free(received)
    return ordered


def join_heads(ledger: Ledger, sizes: LayerSizes, *parts: tuple[int, int], given: Iterable[Block] = ()) -> list[Block]:
    """Return the tensors after the second all-to-all.

    `parts` are (width, heads that one rank has). Parts with one head are views of the received tensor, not copies.
    `given`: the tensors before it, which are freed.
    """
    widths = [width * sizes.tokens * sizes.narrow for width, _ in parts]
    joined = ledger.make("heads to join", sum(widths))
    ledger.free(*given)
    packed = ledger.make("heads to send", sum(widths))
    ledger.free(joined)
    received = ledger.make("heads received", sum(widths))
    ledger.free(packed)
    copies = [ledger.make("heads", n) for n, (_, share) in zip(widths, parts, strict=True) if share > 1]
    if len(copies) < len(parts):
        return [*copies, received]
    ledger.free(received)
    return copies

"""Requests of a gated delta net on one context-parallel rank (memo.parallel.context_delta).

The memory of a group of tokens is an upper bound (memo.spec.delta)."""

import math

from memo.estimate.program.exchange import exchanged, join_heads, split_heads
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.spec.delta import carry_size, fla_bytes, fla_document_bytes, group_elements, group_tokens


def delta_forward(ledger: Ledger, sizes: LayerSizes) -> None:
    """Run the forward of this rank's tokens; the output is written to existing memory."""
    inner = exchanged(sizes)
    if sizes.a2a == 1:
        return _run(ledger, inner)
    own = _all_of_heads(ledger, sizes.qkv * sizes.tokens * sizes.narrow)
    out = ledger.make("heads", inner.tokens * inner.q * inner.narrow)
    _run(ledger, inner)
    ledger.free(*join_heads(ledger, sizes, (sizes.q, 1)), own, out)


def delta_backward(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return the gradient of the net's inputs for this rank's tokens."""
    inner, widths = exchanged(sizes), (sizes.qkv, sizes.q) if sizes.a2a > 1 else ()
    given = [_all_of_heads(ledger, width * sizes.tokens * sizes.narrow) for width in widths]
    grad = ledger.make("delta net gradient", inner.tokens * inner.qkv * inner.narrow)
    _run(ledger, inner, backward=True)
    if sizes.a2a == 1:
        return grad
    parts = join_heads(ledger, sizes, (sizes.qkv, 2))
    whole = ledger.make("delta net gradient", sizes.qkv * sizes.tokens * sizes.narrow)
    ledger.free(*parts, grad, *given)
    return whole


def _all_of_heads(ledger: Ledger, num_bytes: int) -> Block:
    """Return all tokens of some heads, with several parts side by side."""
    parts = split_heads(ledger, num_bytes)
    whole = ledger.make("heads", num_bytes)
    ledger.free(parts)
    return whole


def _run(ledger: Ledger, sizes: LayerSizes, backward: bool = False) -> None:
    """Run all groups of `sizes.tokens` tokens, of all sequences. A backward keeps the carry before each group."""
    heads, d, channels = sizes.heads, sizes.head_dim, sizes.kv / sizes.heads
    group = group_tokens(heads, sizes.batch) * sizes.batch
    carry = sizes.batch * carry_size(heads, sizes.kv_heads, d) * sizes.wide
    carries = ledger.make("carries", (2 + (math.ceil(sizes.tokens / group) if backward else 0)) * carry)
    if sizes.fla:
        own = fla_bytes(d, channels, backward)
        more = 2 * carry + (fla_document_bytes(heads, d, sizes.batch, backward) if sizes.packed else 0)
    else:
        own, more = group_elements(d, d + 2 * channels, backward, sizes.mixed) * sizes.wide, 0
    ledger.scratch(("group of a delta net", int(min(sizes.tokens, group) * heads * own) + more))
    ledger.free(carries)

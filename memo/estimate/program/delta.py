"""Requests of a gated delta net on one context-parallel rank (memo.parallel.context_delta).

The memory of a group of tokens is an upper bound (memo.spec.delta)."""

from memo.estimate.program.exchange import exchanged, join_heads, split_heads
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.spec.delta import carry_size, fla_bytes, fla_document_bytes, group_elements, group_tokens


def delta_forward(ledger: Ledger, sizes: LayerSizes) -> None:
    """Run the forward of this rank's tokens; the output is written to existing memory."""
    if sizes.a2a == 1:
        return _run(ledger, sizes)
    inner = exchanged(sizes)
    own = _all_of_heads(ledger, sizes.qkv * sizes.tokens * sizes.narrow)
    out = ledger.make("heads", inner.tokens * inner.q * inner.narrow)
    _run(ledger, inner)
    ledger.free(*join_heads(ledger, sizes, (sizes.q, 1)), own, out)


def delta_backward(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return the gradient of the net's inputs for this rank's tokens."""
    if sizes.a2a == 1:
        return _run_backward(ledger, sizes)
    own, grad_out = (_all_of_heads(ledger, width * sizes.tokens * sizes.narrow) for width in (sizes.qkv, sizes.q))
    grad = _run_backward(ledger, exchanged(sizes))
    parts = join_heads(ledger, sizes, (sizes.qkv, 2))
    whole = ledger.make("delta net gradient", sizes.qkv * sizes.tokens * sizes.narrow)
    ledger.free(*parts, grad, own, grad_out)
    return whole


def _all_of_heads(ledger: Ledger, num_bytes: int) -> Block:
    """Return all tokens of some heads, with several parts side by side."""
    parts = split_heads(ledger, num_bytes)
    whole = ledger.make("heads", num_bytes)
    ledger.free(parts)
    return whole


def _group_bytes(sizes: LayerSizes, backward: bool) -> int:
    if sizes.fla:
        documents = fla_document_bytes(sizes.heads, sizes.head_dim, sizes.batch, backward) if sizes.packed else 0
        own = fla_bytes(sizes.head_dim, sizes.kv / sizes.heads, backward)
        return int(min(sizes.tokens, _group(sizes)) * sizes.heads * own) + documents + 2 * _carry_bytes(sizes)
    elements = group_elements(sizes.head_dim, sizes.head_dim + 2 * sizes.kv / sizes.heads, backward, sizes.mixed)
    return int(min(sizes.tokens, _group(sizes)) * sizes.heads * elements * sizes.wide)


def _group(sizes: LayerSizes) -> int:
    """Tokens of all sequences that are computed at a time."""
    return group_tokens(sizes.heads, sizes.batch) * sizes.batch


def _carry_bytes(sizes: LayerSizes) -> int:
    return sizes.batch * carry_size(sizes.heads, sizes.kv_heads, sizes.head_dim) * sizes.wide


def _run(ledger: Ledger, sizes: LayerSizes, backward: bool = False) -> None:
    """Run all groups of `sizes.tokens` tokens. A backward keeps the carry before each group."""
    groups = -(-sizes.tokens // _group(sizes)) if backward else 0
    carries = ledger.make("carries", (groups + 2) * _carry_bytes(sizes))
    ledger.scratch(("group of a delta net", _group_bytes(sizes, backward)))
    ledger.free(carries)


def _run_backward(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return the gradient of the net's inputs, with all heads that this rank has."""
    grad = ledger.make("delta net gradient", sizes.tokens * sizes.qkv * sizes.narrow)
    _run(ledger, sizes, backward=True)
    return grad

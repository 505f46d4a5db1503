"""Requests of a gated delta net on one context-parallel rank (memo.parallel.context_delta).

The memory of a group of tokens is an upper bound (memo.spec.delta)."""

from memo.estimate.program.exchange import exchanged, join_heads, split_heads
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.spec.delta import carry_size, fla_bytes, fla_document_bytes, group_elements, group_tokens


def delta_forward(ledger: Ledger, z: LayerSizes) -> None:
    """Run the forward of this rank's tokens; the output is written to existing memory."""
    if z.a2a == 1:
        return _run_forward(ledger, z)
    inner = exchanged(z)
    own = _all_of_heads(ledger, z.qkv * z.tokens * z.narrow)
    out = ledger.make("heads", inner.tokens * inner.q * inner.narrow)
    _run_forward(ledger, inner)
    ledger.free(*join_heads(ledger, z, (z.q, 1)), own, out)


def delta_backward(ledger: Ledger, z: LayerSizes) -> Block:
    """Return the gradient of the net's inputs for this rank's tokens."""
    if z.a2a == 1:
        return _run_backward(ledger, z)
    own, grad_out = (_all_of_heads(ledger, width * z.tokens * z.narrow) for width in (z.qkv, z.q))
    grad = _run_backward(ledger, exchanged(z))
    parts = join_heads(ledger, z, (z.qkv, 2))
    whole = ledger.make("delta net gradient", z.qkv * z.tokens * z.narrow)
    ledger.free(*parts, grad, own, grad_out)
    return whole


def _all_of_heads(ledger: Ledger, num_bytes: int) -> Block:
    """Return all tokens of some heads, with several parts side by side."""
    parts = split_heads(ledger, num_bytes)
    whole = ledger.make("heads", num_bytes)
    ledger.free(parts)
    return whole


def _group_bytes(z: LayerSizes, backward: bool) -> int:
    if z.fla:
        documents = fla_document_bytes(z.heads, z.head_dim, z.batch, backward) if z.packed else 0
        own = fla_bytes(z.head_dim, z.kv / z.heads, backward)
        return int(min(z.tokens, _group(z)) * z.heads * own) + documents + 2 * _carry_bytes(z)
    elements = group_elements(z.head_dim, z.head_dim + 2 * z.kv / z.heads, backward, z.mixed)
    return int(min(z.tokens, _group(z)) * z.heads * elements * z.wide)


def _group(z: LayerSizes) -> int:
    """Tokens of all sequences that are computed at a time."""
    return group_tokens(z.heads, z.batch) * z.batch


def _carry_bytes(z: LayerSizes) -> int:
    return z.batch * carry_size(z.heads, z.kv_heads, z.head_dim) * z.wide


def _run_forward(ledger: Ledger, z: LayerSizes) -> None:
    """Run the forward of `z.tokens` tokens, with all heads that this rank has."""
    carries = ledger.make("carries", 2 * _carry_bytes(z))
    ledger.scratch(("group of a delta net", _group_bytes(z, backward=False)))
    ledger.free(carries)


def _run_backward(ledger: Ledger, z: LayerSizes) -> Block:
    """Return the gradient of the net's inputs."""
    grad = ledger.make("delta net gradient", z.tokens * z.qkv * z.narrow)
    groups = -(-z.tokens // _group(z))
    carries = ledger.make("carries", (groups + 2) * _carry_bytes(z))
    ledger.scratch(("group of a delta net", _group_bytes(z, backward=True)))
    ledger.free(carries)
    return grad

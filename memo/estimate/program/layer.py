"""One transformer layer under autograd (memo.model.layer), forward and backward, tensor by tensor."""

from dataclasses import dataclass

from memo.estimate.program.attention import attention_backward, attention_forward
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import (
    Matrix,
    column_backward,
    column_forward,
    row_backward,
    row_forward,
)
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import (
    Normed,
    activation_backward,
    activation_forward,
    norm_backward,
    norm_forward,
    rope_backward,
    rope_forward,
)


@dataclass
class Heads:
    """q, k and v as attention takes them: q or k is None if it is a view of qkv, as v always is."""

    q_norm: Normed | None = None
    k_norm: Normed | None = None
    q: Block | None = None
    k: Block | None = None


@dataclass
class Kept:
    """What a layer's forward keeps for its backward."""

    x: Block | None
    attention_norm: Normed
    qkv: Block
    heads: Heads
    attention_out: Block
    lse: Block | None
    residual: Block | None
    mlp_norm: Normed
    inner: Block
    silu: Block | None
    active: Block


def matrices(z: LayerSizes) -> tuple[Matrix, Matrix, Matrix, Matrix]:
    """The matrices qkv, projection, fc1 and fc2."""
    return (
        Matrix(z.qkv, z.qkv_bias),
        Matrix(z.q, z.linear_bias),
        Matrix(z.fc1, z.linear_bias),
        Matrix(z.ffn, z.linear_bias),
    )


def layer_forward(ledger: Ledger, z: LayerSizes, x: Block) -> tuple[Block, Kept]:
    """(output, what is kept). x is kept if the norm's backward needs it, else it is freed at the end."""
    residual, added, kept = _to_the_last_sum(ledger, z, x)
    y = ledger.make("layer output", added.num_bytes)
    ledger.free(added)
    if not _keeps_inputs(z):
        ledger.free(residual, x)
    return y, kept


def _to_the_last_sum(ledger: Ledger, z: LayerSizes, x: Block) -> tuple[Block, Block, Kept]:
    """The forward without its last sum: (residual, what the MLP adds to it, what is kept)."""
    qkv_matrix, projection, fc1, fc2 = matrices(z)
    rows = z.tokens // z.tp
    attention_norm = norm_forward(ledger, z, "attention_norm", rows, z.hidden, graph=True)
    qkv = column_forward(ledger, z, qkv_matrix, "qkv", attention_norm.out, z.tokens)
    heads = heads_forward(ledger, z, z.tokens, graph=True)
    out, lse = attention_forward(ledger, z)
    if z.recomputes_attention:
        ledger.free(lse)
    projected = row_forward(ledger, z, projection, z.tokens)
    residual = ledger.make("residual", projected.num_bytes)
    mlp_norm = norm_forward(ledger, z, "mlp_norm", rows, z.hidden, graph=True)
    ledger.free(projected)
    inner = column_forward(ledger, z, fc1, "fc1", mlp_norm.out, z.tokens)
    active, silu = activation_forward(ledger, z, z.tokens, graph=True)
    added = row_forward(ledger, z, fc2, z.tokens)
    kept = Kept(x, attention_norm, qkv, heads, out, lse, residual, mlp_norm, inner, silu, active)
    if z.recomputes_attention:
        kept.lse = None
    if not _keeps_inputs(z):
        kept.x = kept.residual = None
    return residual, added, kept


def _keeps_inputs(z: LayerSizes) -> bool:
    """Whether norms keep their inputs; a composed RMSNorm keeps a wide copy of a narrow input instead."""
    return not (z.composes_norm and z.mixed)


def layer_backward(ledger: Ledger, z: LayerSizes, kept: Kept, grad: Block, *, held: bool) -> Block:
    """Gradient of the input.

    It is the same tensor as the gradient of the output, to which autograd adds in place, unless the caller keeps that
    one alive (`held`).
    """
    qkv_matrix, projection, fc1, fc2 = matrices(z)
    grad_active = row_backward(ledger, z, fc2, grad, kept.active, z.tokens)
    grad_inner = activation_backward(ledger, z, z.tokens, kept.silu, grad_active, kept.inner)
    grad_normed = column_backward(ledger, z, fc1, grad_inner, kept.mlp_norm.out, z.tokens)
    summed = norm_backward(ledger, z, kept.mlp_norm, grad_normed, kept.residual, adds=not held)
    grad = grad if summed is None else summed
    grad_out = row_backward(ledger, z, projection, grad, None, z.tokens)
    again = attention_forward(ledger, z) if z.recomputes_attention else ()
    grads = attention_backward(ledger, z)
    ledger.free(grad_out, kept.heads.q, kept.heads.k)
    if kept.heads.q_norm is None:
        ledger.free(kept.qkv)
    ledger.free(kept.attention_out, kept.lse, *again)
    grad_qkv = heads_backward(ledger, z, z.tokens, kept.heads, grads, kept.qkv)
    grad_normed = column_backward(ledger, z, qkv_matrix, grad_qkv, kept.attention_norm.out, z.tokens)
    norm_backward(ledger, z, kept.attention_norm, grad_normed, kept.x, adds=True)
    return grad


def unkept_forward(ledger: Ledger, z: LayerSizes) -> Block:
    """Output of a layer that keeps nothing but its input (--recompute-granularity full)."""
    qkv_matrix, projection, fc1, fc2 = matrices(z)
    rows = z.tokens // z.tp
    normed = norm_forward(ledger, z, "attention_norm", rows, z.hidden, graph=False).out
    qkv = column_forward(ledger, z, qkv_matrix, "qkv", normed, z.tokens)
    heads = heads_forward(ledger, z, z.tokens, graph=False)
    out, lse = attention_forward(ledger, z)
    ledger.free(lse)
    projected = row_forward(ledger, z, projection, z.tokens)
    ledger.free(heads.q, heads.k, qkv, out, normed)
    residual = ledger.make("residual", projected.num_bytes)
    normed = norm_forward(ledger, z, "mlp_norm", rows, z.hidden, graph=False).out
    ledger.free(projected)
    inner = column_forward(ledger, z, fc1, "fc1", normed, z.tokens)
    active, _ = activation_forward(ledger, z, z.tokens, graph=False)
    ledger.free(inner)
    added = row_forward(ledger, z, fc2, z.tokens)
    ledger.free(active, normed)
    y = ledger.make("layer output", added.num_bytes)
    ledger.free(added, residual)
    return y


def recomputed_backward(ledger: Ledger, z: LayerSizes, x: Block, grad: Block, *, held: bool) -> Block:
    """The forward again, without its last sum, and then the backward; x is freed."""
    residual, added, kept = _to_the_last_sum(ledger, z, x)
    ledger.free(added)
    if not _keeps_inputs(z):
        ledger.free(residual)
    grad = layer_backward(ledger, z, kept, grad, held=held)
    if not _keeps_inputs(z):
        ledger.free(x)
    return grad


def heads_forward(ledger: Ledger, z: LayerSizes, tokens: int, graph: bool) -> Heads:
    """What SelfAttention.prepare does on `tokens` tokens: the norms of q and k, then RoPE on both."""
    heads = normed_heads_forward(ledger, z, tokens, graph)
    if z.rope:
        heads.q = rope_forward(ledger, z, "rotated q", tokens, z.q)
        heads.k = rope_forward(ledger, z, "rotated k", tokens, z.kv)
        if z.qk_norm and heads.q_norm is not None and heads.k_norm is not None:
            ledger.free(heads.q_norm.out, heads.k_norm.out)  # RoPE's backward needs nothing but its table
    return heads


def normed_heads_forward(ledger: Ledger, z: LayerSizes, tokens: int, graph: bool) -> Heads:
    heads = Heads()
    if z.qk_norm:
        heads.q_norm = norm_forward(ledger, z, "normed q", tokens * z.heads, z.head_dim, graph)
        heads.k_norm = norm_forward(ledger, z, "normed k", tokens * z.kv_heads, z.head_dim, graph)
        heads.q, heads.k = heads.q_norm.out, heads.k_norm.out
    return heads


def heads_backward(
    ledger: Ledger, z: LayerSizes, tokens: int, heads: Heads, grads: list[Block] | None, qkv: Block | None
) -> Block:
    """Gradient of qkv. `grads`, those of q, k and v, are freed once used; None if the caller frees them.

    If heads are normed, `qkv` is freed after the backward of their norms.
    """
    grad_q, grad_k, rest = _by_use(grads)
    if z.rope:
        grad_k = rope_backward(ledger, z, "k gradient", tokens, z.kv, grad_k)
        grad_q = rope_backward(ledger, z, "q gradient", tokens, z.q, grad_q)
    whole = normed_heads_backward(ledger, z, tokens, heads, grad_q, grad_k, qkv)
    ledger.free(*rest)
    return whole


def normed_heads_backward(
    ledger: Ledger,
    z: LayerSizes,
    tokens: int,
    heads: Heads,
    grad_q: Block | None = None,
    grad_k: Block | None = None,
    qkv: Block | None = None,
) -> Block:
    """Gradient of qkv; the given blocks are freed."""
    if heads.q_norm is not None and heads.k_norm is not None:
        grad_k = norm_backward(ledger, z, heads.k_norm, grad_k, None, adds=False)
        grad_q = norm_backward(ledger, z, heads.q_norm, grad_q, None, adds=False)
        ledger.free(qkv)
    whole = ledger.make("qkv gradient", tokens * z.qkv * z.narrow)
    ledger.free(grad_q, grad_k)
    return whole


def _by_use(grads: list[Block] | None) -> tuple[Block | None, Block | None, list[Block]]:
    """(freed with q, freed with k, freed at the end), for [dq, dk, dv] or for fewer tensors that hold them."""
    if grads is None:
        return None, None, []
    if len(grads) == 3:
        dq, dk, dv = grads
        return dq, dk, [dv]
    own_q = [block for block in grads if block.name.startswith("dq")]
    return (own_q[0] if own_q else None), None, [block for block in grads if block not in own_q]

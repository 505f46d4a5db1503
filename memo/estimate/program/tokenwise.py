"""Requests of the parts of a layer that work token by token (norms, RoPE, the MLP's activation function).

Each function follows the requests of torch's CPU kernels, in their order. With `graph` a forward keeps the tensors for
its backward, as memo.parallel.replayed does; without `graph` it keeps only its output. Gradients of outputs belong to
the callers.
"""

from dataclasses import dataclass
from typing import Any

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes


@dataclass
class Normed:
    """A norm of `rows` rows of `width` elements: its output, and tensors that its backward needs besides input and
    output."""

    rows: int
    width: int
    out: Block
    kept: tuple[Block, ...] = ()


def norm_forward(ledger: Ledger, sizes: LayerSizes, name: str, rows: int, width: int, graph: bool) -> Normed:
    """Return the output of a norm.

    On CPUs RMSNorm is composed of elementwise operations, which use the wide dtype for a narrow input. The input and
    the scaled output are then kept in the wide dtype, and scratch memory is an upper bound.
    """
    wide = rows * width * sizes.wide
    if sizes.widens_norm and not graph:  # the input and the result in the wide dtype, before the output exists
        ledger.scratch(("wide input", wide), ("wide norm", wide))
    out = ledger.make(name, rows * width * sizes.narrow)
    if sizes.composes_norm:
        kept = [ledger.make("normalized", wide), ledger.make("statistics", rows * sizes.wide)]
        if sizes.mixed:
            kept.append(ledger.make("wide input", wide))
            ledger.scratch(("norm scratch", wide))
    else:
        kept = [ledger.make("statistics", rows * sizes.statistic) for _ in range(1 if sizes.rms else 2)]
        if sizes.widens_norm and graph:
            kept.append(ledger.make("wide input", wide))
            ledger.scratch(("wide norm", wide))
    if sizes.norms_from_zero:
        kept.append(ledger.make("norm factor", width * sizes.wide))
    if graph:
        return Normed(rows, width, out, tuple(kept))
    ledger.free(*kept)
    return Normed(rows, width, out)


def norm_backward(ledger: Ledger, sizes: LayerSizes, saved: Normed) -> Block:
    """Return the gradient of the input. Known error: on CPUs a frozen factor takes one wide input less.

    The ledger's tail begins after the weight's gradient, when the reduction of a module's last bucket starts.
    """
    rows, width, wide = saved.rows, saved.width, saved.rows * saved.width * sizes.wide
    if not sizes.composes_norm:
        ledger.scratch(("wide norm", 2 * wide if sizes.widens_norm else 0))
        grad_x = ledger.make("norm gradient", rows * width * sizes.narrow)
        ledger.scratch(
            ("norm weight gradients", 2 * width * sizes.narrow),
            ("norm scratch", 2 * sizes.threads * width * sizes.wide),
        )
        ledger.free(*saved.kept)
        ledger.mark_reduction_start()
        return grad_x
    ledger.scratch(("norm scratch", (3 if sizes.mixed else 2) * wide + width * sizes.wide))
    ledger.mark_reduction_start()
    normalized, *kept = saved.kept
    ledger.free(normalized)
    grad_x = ledger.make("norm gradient", rows * width * sizes.narrow)
    # The terms of the gradient through the mean, as measured in torch 2.13 for narrow and wide inputs.
    ledger.scratch(("norm scratch", 4 * wide + (wide // 2 if sizes.mixed else 0)))
    ledger.free(*kept)
    return grad_x


@dataclass
class Heads:
    """Normed q, k and v; None if they are views of qkv."""

    q: Normed | None = None
    k: Normed | None = None
    v: Normed | None = None

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(norm.out for norm in (self.q, self.k, self.v) if norm is not None)


def heads_forward(ledger: Ledger, sizes: LayerSizes, graph: bool) -> Heads:
    """Return the normed q and k, if the model norms them, and v likewise."""
    if not sizes.qk_norm:
        return Heads()
    if sizes.qk_across and sizes.tp > 1:
        return _split_forward(ledger, sizes, graph)
    (rows, of_k), widths = (sizes.heads, sizes.kv_heads), (sizes.head_dim, sizes.head_dim)
    if sizes.qk_across:
        (rows, of_k), widths = (1, 1), (sizes.q, sizes.kv)
    q = norm_forward(ledger, sizes, "normed q", sizes.tokens * rows, widths[0], graph)
    k = norm_forward(ledger, sizes, "normed k", sizes.tokens * of_k, widths[1], graph)
    if not sizes.v_norm:
        return Heads(q, k)
    v = norm_forward(ledger, sizes, "normed v", sizes.tokens * sizes.kv_heads, sizes.head_dim, graph)
    ones = ledger.make("ones", sizes.head_dim * sizes.narrow)
    if not graph:
        ledger.free(ones)
    return Heads(q, k, Normed(v.rows, v.width, v.out, (*v.kept, ones)) if graph else v)


def _split_forward(ledger: Ledger, sizes: LayerSizes, graph: bool) -> Heads:
    """Return norms over a width that tp splits (memo.parallel.split_norm). CPUs cast narrow inputs and outputs."""
    scratch = [sizes.tokens * width * sizes.wide if sizes.mixed else 0 for width in (sizes.q, sizes.kv)]
    ledger.scratch(*(("norm scratch", size) for size in scratch[:1]))
    statistics, made = ledger.make("statistics", 4 * sizes.tokens * sizes.wide), []
    for name, width, size in zip("qk", (sizes.q, sizes.kv), scratch, strict=True):
        made.append(Normed(sizes.tokens, width, ledger.make(f"normed {name}", sizes.tokens * width * sizes.narrow)))
        ledger.scratch(("norm scratch", size), ("norm scratch", size))
    if graph:
        return Heads(Normed(sizes.tokens, sizes.q, made[0].out, (statistics,)), made[1])
    ledger.free(statistics)
    return Heads(*made)


def _split_backward(ledger: Ledger, sizes: LayerSizes, heads: Heads) -> list[Block]:
    """Return the gradients of q and k; two wide terms of q and k live beside them."""
    assert heads.q is not None
    terms = [ledger.make("norm terms", sizes.tokens * (sizes.q + sizes.kv) * sizes.wide) for _ in range(2)]
    ledger.scratch(("norm gradient terms", 2 * sizes.tokens * sizes.q * sizes.wide))
    grads = [ledger.make("norm gradient", sizes.tokens * width * sizes.narrow) for width in (sizes.q, sizes.kv)]
    ledger.free(*terms, *heads.q.kept)
    return grads


def heads_backward(ledger: Ledger, sizes: LayerSizes, heads: Heads) -> Block:
    """Return the gradient of qkv."""
    if sizes.qk_norm and sizes.qk_across and sizes.tp > 1:
        grads = _split_backward(ledger, sizes, heads)
    else:
        grads = [] if heads.v is None else [norm_backward(ledger, sizes, heads.v)]
        for norm in (heads.k, heads.q):
            if norm is not None:
                grads += [
                    norm_backward(ledger, sizes, norm),
                    ledger.make("norm weight gradient", norm.width * sizes.narrow),
                ]
            if sizes.keys_as_values and norm is heads.k:  # both gradients are added up
                ledger.free(grads.pop(0))
    width = sizes.qkv - (sizes.kv if sizes.keys_as_values else 0)
    whole = ledger.make("qkv gradient", sizes.tokens * width * sizes.narrow)
    ledger.free(*grads)
    return whole


def rope_in_place(ledger: Ledger, sizes: LayerSizes) -> None:
    """Rotate q and then k, or their gradients, in place."""
    for heads in (sizes.heads, sizes.kv_heads):
        ledger.scratch(("new low half", sizes.tokens * heads * sizes.rotary_dim * sizes.narrow // 2))


def activation_forward(
    ledger: Ledger, sizes: LayerSizes, graph: bool, is_weighted: bool = False
) -> tuple[Block, tuple[Block, ...]]:
    """Return (activation, tensors that the backward needs besides input and output).

    `is_weighted`: whether a token's score or routing weight multiplies the activation."""
    num_bytes = sizes.tokens * sizes.ffn * sizes.narrow
    # Without a graph, the first term becomes the activation.
    count = sizes.activation_terms if graph else sizes.activation_terms - 1
    kept = tuple(ledger.make("activation term", num_bytes) for _ in range(count))
    active = ledger.make("activation", num_bytes)
    if not graph:
        ledger.free(*kept)
    if is_weighted:
        plain, active = active, ledger.make("activation", num_bytes)
        kept = (plain, *kept)
        if not graph:
            ledger.free(plain)
    return active, kept if graph else ()


def activation_backward(ledger: Ledger, sizes: LayerSizes, kept: tuple[Block, ...], grad: Block | None = None) -> Block:
    """Return the gradient of fc1's output. `grad`: the gradient of the activation if autograd made and frees it."""
    elements = sizes.tokens * sizes.ffn
    made = ledger.make("fc1 gradient", (2 if sizes.gated else 1) * elements * sizes.narrow)
    if sizes.activation_terms > 1:  # where a clamp lets no gradient pass
        ledger.scratch(("absolute values", elements * sizes.narrow), ("mask", elements))
    ledger.free(grad, *kept)
    return made


def weighted_activation_backward(ledger: Ledger, sizes: LayerSizes, saved: tuple[Block, ...]) -> Block:
    """Return the gradient of fc1's output, where a token's score or routing weight multiplies the activation.

    `saved`: the activation without the factor, and tensors as for `activation_backward`. The factor's gradient is
    small, but the product from which it is summed is not."""
    plain, *kept = saved
    grad = ledger.make("activation term", plain.num_bytes)
    ledger.scratch(("activation term", plain.num_bytes))
    ledger.free(plain)
    return activation_backward(ledger, sizes, tuple(kept), grad)


def gate_forward(ledger: Ledger, sizes: LayerSizes, graph: bool) -> tuple[Block, Any]:
    """Return (attention's output times its gate, tensors that the backward needs besides input and output)."""
    if sizes.delta:
        return _normed_gate_forward(ledger, sizes, graph)
    num_bytes = sizes.tokens * sizes.q * sizes.narrow
    sigmoid = ledger.make("sigmoid of the gate", num_bytes)
    gated = ledger.make("gated", num_bytes)
    if graph:
        return gated, (sigmoid,)
    ledger.free(sigmoid)
    return gated, ()


def gate_backward(ledger: Ledger, sizes: LayerSizes, kept: Any) -> tuple[Block, Block]:
    """Return the gradients of attention's output and of the gate."""
    if sizes.delta:
        return _normed_gate_backward(ledger, sizes, kept)
    num_bytes = sizes.tokens * sizes.q * sizes.narrow
    of_output, of_sigmoid = (ledger.make(name, num_bytes) for name in ("output gradient", "sigmoid gradient"))
    of_gate = ledger.make("gate gradient", num_bytes)
    ledger.free(of_sigmoid, *kept)
    return of_output, of_gate


def _normed_gate_forward(ledger: Ledger, sizes: LayerSizes, graph: bool) -> tuple[Block, Any]:
    """The norm of each head, times the SiLU of the gate; the factor and the product are in the wide dtype."""
    elements = sizes.tokens * sizes.q
    of_heads = sizes._replace(norms_from_zero=False)
    normed = norm_forward(ledger, of_heads, "normed output", sizes.tokens * sizes.heads, sizes.head_dim, graph)
    wide_gate = ledger.make("wide gate", elements * sizes.wide * sizes.mixed)
    silu = ledger.make("SiLU of the gate", elements * sizes.wide)
    gated = _narrowed(ledger, sizes, ledger.make("gated", elements * sizes.wide))
    if graph:
        return gated, (normed, wide_gate, silu)
    ledger.free(normed.out, wide_gate, silu)
    return gated, None


def _normed_gate_backward(ledger: Ledger, sizes: LayerSizes, kept: tuple[Normed, Block, Block]) -> tuple[Block, Block]:
    normed, wide_gate, silu = kept
    wide = sizes.tokens * sizes.q * sizes.wide
    grad = ledger.make("wide gradient", wide * sizes.mixed)
    of_normed, of_silu = (ledger.make("gate gradient", wide) for _ in range(2))
    ledger.free(grad, silu)
    of_normed = _narrowed(ledger, sizes, of_normed)
    of_gate = ledger.make("gate gradient", wide)
    ledger.free(of_silu, wide_gate)
    of_gate = _narrowed(ledger, sizes, of_gate)
    of_output = norm_backward(ledger, sizes._replace(norms_from_zero=False), normed)
    ledger.free(normed.out, of_normed)
    return of_output, of_gate


def _narrowed(ledger: Ledger, sizes: LayerSizes, wide: Block) -> Block:
    """Cast a tensor in the wide dtype to the model's dtype."""
    if not sizes.mixed:
        return wide
    narrow = ledger.make(wide.name, wide.num_bytes // sizes.wide * sizes.narrow)
    ledger.free(wide)
    return narrow

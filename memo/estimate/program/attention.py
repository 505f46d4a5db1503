"""Requests of attention on one context-parallel rank, for each --cp-comm-type of memo.parallel.context.

q, k and v belong to the caller. Each sequence counts as one document; shorter documents only make the blocks smaller.
If documents are packed, the results are allocated before the kernel is called (memo.parallel.context), so the outputs
of the kernel live beside them.
"""

from collections.abc import Callable, Iterable

from memo.estimate.program.attention_calls import (
    Call,
    different_steps,
    fused_row,
    gathered_calls,
    ring_calls,
    rows_calls,
    short_calls,
    window_calls,
    within_reach,
)
from memo.estimate.program.attention_kernel import kernel_backward, kernel_forward, kv_bytes, lse_bytes, q_bytes
from memo.estimate.program.delta import delta_backward, delta_forward
from memo.estimate.program.exchange import exchanged, join_heads, split_heads
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import all_gather, scattered
from memo.estimate.program.sizes import LayerSizes
from memo.spec.attention_workspace import SINK_TOKENS
from memo.spec.sweep import BACKWARD_KEYS_PER_QUERY


def attention_forward(ledger: Ledger, sizes: LayerSizes, placed: bool = False) -> tuple[Block, Block]:
    """Return (output, log-sum-exp). A `placed` output is written to a slot, which exists already: its block is empty.

    Both blocks of a gated delta net are empty, because its output is always placed.
    """
    if sizes.delta:
        delta_forward(ledger, sizes)
        return ledger.make("attention_out", 0), ledger.make("lse", 0)
    return _forward_with_exchange(ledger, sizes, placed, lambda inner, at: _ring_forward(ledger, inner, at))


def attention_backward(ledger: Ledger, sizes: LayerSizes) -> list[Block]:
    """Return the gradients of q, k and v, in one tensor if one message carries them; for a delta net that of qkv."""
    if sizes.delta:
        return [delta_backward(ledger, sizes)]
    return _with_exchange(ledger, sizes, sizes.qkv + 2 * sizes.q, lambda inner, row: _ring_backward(ledger, inner, row))


def rows_forward_placed(ledger: Ledger, sizes: LayerSizes, before: int) -> Block:
    """Return the log-sum-exp of the `sizes.tokens` queries of a tile; empty for a gated delta net.

    The tile is split over cp ranks, which have `before` tokens before it in all. The output is in a slot; keys and
    values are in their store.
    """
    if sizes.delta:
        return attention_forward(ledger, sizes, placed=True)[1]
    gather_rows(ledger, sizes)
    return _forward_with_exchange(ledger, sizes, True, lambda inner, at: _rows_forward(ledger, inner, before, at))[1]


def _forward_with_exchange(
    ledger: Ledger, sizes: LayerSizes, placed: bool, forward: Callable[[LayerSizes, bool], tuple[Block, Block]]
) -> tuple[Block, Block]:
    """Run `forward`, between the two all-to-alls if ranks exchange heads; it is called with whether its output is
    placed."""
    if sizes.a2a == 1:
        return forward(sizes, placed)
    inner, heads = exchanged(sizes), split_heads(ledger, sizes.qkv * sizes.tokens * sizes.narrow)
    inner_out, lse = forward(inner, False)
    ledger.free(heads)
    share = 1 if placed else inner.heads  # a copy into the slot takes no memory
    (out,) = join_heads(ledger, sizes, (sizes.q, share), given=[inner_out])
    return _left(ledger, out, placed), lse


def gather_rows(ledger: Ledger, sizes: LayerSizes) -> None:
    """Gather keys and values of a tile, which go to their store."""
    ledger.free(all_gather(ledger, sizes.ring, "k and v gathered", sizes.ring * 2 * kv_bytes(sizes)))


def _rows_forward(ledger: Ledger, sizes: LayerSizes, before: int, placed: bool) -> tuple[Block, Block]:
    found = _attended(ledger, sizes, rows_calls(sizes, before), placed)
    _sinks_scratch(ledger, sizes, backward=False)
    return found


def rows_backward(ledger: Ledger, sizes: LayerSizes, before: int) -> list[Block]:
    """Return the gradients of a tile's queries, keys and values; for a delta net the gradient of qkv.

    The sums of gradients of keys and values are in their store."""
    if sizes.delta:
        return attention_backward(ledger, sizes)
    return _with_exchange(ledger, sizes, 3 * sizes.q, lambda inner, row: _rows_backward(ledger, inner, before, row))


def _rows_backward(ledger: Ledger, sizes: LayerSizes, before: int, row: int) -> list[Block]:
    dq = ledger.make("dq sum", q_bytes(sizes) // sizes.narrow * sizes.wide)
    _sum_calls(ledger, sizes, short_calls(rows_calls(sizes, before), BACKWARD_KEYS_PER_QUERY * sizes.tokens), row)
    dq = _narrowed(ledger, sizes, "dq", q_bytes(sizes), dq)
    own = None
    if sizes.ring > 1:
        ordered = ledger.make("dk and dv to send", sizes.ring * 2 * kv_bytes(sizes) // sizes.narrow * sizes.wide)
        own = scattered(ledger, sizes.ring, "dk and dv", ordered)
    if own is None and not sizes.mixed:
        return [dq]
    return [dq, _narrowed(ledger, sizes, "dk and dv", 2 * kv_bytes(sizes), own)]


def _with_exchange(
    ledger: Ledger, sizes: LayerSizes, width: int, backward: Callable[[LayerSizes, int], list[Block]]
) -> list[Block]:
    """Run `backward`, between the two all-to-alls if ranks exchange heads.

    `backward` is called with the elements between two tokens of its inputs. `width`: width of all tensors that the
    first all-to-all carries, as one tensor.
    """
    if sizes.a2a == 1:
        _sinks_scratch(ledger, sizes, backward=True)
        return backward(sizes, fused_row(sizes))
    inner = exchanged(sizes)
    heads = split_heads(ledger, width * sizes.tokens * sizes.narrow)
    _sinks_scratch(ledger, inner, backward=True)
    inner_grads = backward(inner, max(fused_row(inner), sizes.batch * width // sizes.a2a))
    ledger.free(heads)
    of_keys = (sizes.kv, inner.kv_heads)
    return join_heads(ledger, sizes, (sizes.q, inner.heads), of_keys, of_keys, given=inner_grads)


def _left(ledger: Ledger, out: Block, placed: bool) -> Block:
    """Return the block of an output that the kernel writes to a new tensor: empty once it is copied to its place."""
    if not placed:
        return out
    ledger.free(out)
    return ledger.make(out.name, 0)


def _sinks_scratch(ledger: Ledger, sizes: LayerSizes, backward: bool) -> None:
    """Scratch memory to join the sinks (memo.attention.sinks). CPUs cast the factors; a backward casts on its own."""
    tokens, casts = min(SINK_TOKENS, sizes.tokens), sizes.mixed * (not sizes.on_cuda)
    copies = 1 + sizes.mixed + casts if backward else 2 * casts
    if sizes.sinks:
        ledger.scratch(
            ("sinks", copies * tokens * sizes.q * sizes.wide), ("weights of sinks", lse_bytes(sizes, tokens))
        )


def _ring_forward(ledger: Ledger, sizes: LayerSizes, placed: bool) -> tuple[Block, Block]:
    found = _without_sinks(ledger, sizes, placed)
    _sinks_scratch(ledger, sizes, backward=False)
    return found


def _without_sinks(ledger: Ledger, sizes: LayerSizes, placed: bool) -> tuple[Block, Block]:
    if sizes.ring == 1:
        calls = window_calls(sizes) if sizes.window else [Call(sizes.tokens, sizes.tokens, causal=True)]
        return _attended(ledger, sizes, calls, placed)
    if sizes.gathers_kv:
        gathered = _gather(ledger, sizes)
        out, lse = _attended(ledger, sizes, gathered_calls(sizes), placed)
        ledger.free(gathered)
        return out, lse
    kv = ledger.make("k and v", 2 * kv_bytes(sizes))
    merger = _start_merger(ledger, sizes, placed)
    steps = different_steps(sizes)
    for step in steps:
        incoming = ledger.make("k and v", 2 * kv_bytes(sizes)) if step < steps[-1] else None
        _merge_calls(ledger, sizes, ring_calls(sizes, step))
        if incoming is not None:
            ledger.free(kv)
            kv = incoming
    out, lse = _merged(ledger, sizes, *merger, placed)
    ledger.free(kv)
    return out, lse


def _attended(ledger: Ledger, sizes: LayerSizes, calls: list[Call], placed: bool) -> tuple[Block, Block]:
    if sizes.packed:
        results = (
            ledger.make("attention_out", 0 if placed else q_bytes(sizes)),
            ledger.make("lse", lse_bytes(sizes, sizes.tokens)),
        )
        ledger.free(*_attended(ledger, sizes._replace(packed=False), calls, placed=True))
        return results
    if len(list(within_reach(sizes, calls, fused_row(sizes)))) == 1:
        made, lse = kernel_forward(ledger, sizes, calls[0])
        return _left(ledger, made, placed), lse
    merger = _start_merger(ledger, sizes, placed)
    _merge_calls(ledger, sizes, calls)
    return _merged(ledger, sizes, *merger, placed)


def _start_merger(ledger: Ledger, sizes: LayerSizes, placed: bool) -> tuple[Block, Block]:
    """Return the sum of outputs, empty if it is computed in the output's place, and the log-sum-exp."""
    in_place = placed and not sizes.mixed
    total = ledger.make("merged output", 0 if in_place else q_bytes(sizes) // sizes.narrow * sizes.wide)
    return total, ledger.make("lse", lse_bytes(sizes, sizes.tokens))


def _merged(ledger: Ledger, sizes: LayerSizes, total: Block, lse: Block, placed: bool) -> tuple[Block, Block]:
    return _narrowed(ledger, sizes, "attention_out", 0 if placed else q_bytes(sizes), total), lse


def _narrowed(ledger: Ledger, sizes: LayerSizes, name: str, num_bytes: int, total: Block | None) -> Block:
    """Cast a sum in the wide dtype to the model's dtype; None: the sum is in memory that is not counted here."""
    if total is not None and not sizes.mixed:
        return total
    narrow = ledger.make(name, num_bytes)
    ledger.free(total)
    return narrow


def _merge_calls(ledger: Ledger, sizes: LayerSizes, calls: list[Call]) -> None:
    for call in within_reach(sizes, calls, fused_row(sizes)):
        part = kernel_forward(ledger, sizes, call)
        rows = call.queries * sizes.q
        lse = ledger.make("merged lse", lse_bytes(sizes, call.queries))
        weight = ledger.make("merge weight", lse.num_bytes)
        cast = ledger.make("wide output", rows * sizes.wide) if sizes.mixed else None
        product = ledger.make("weighted output", rows * sizes.wide)
        ledger.free(cast, weight, product, lse, *part)


def _ring_backward(ledger: Ledger, sizes: LayerSizes, row: int) -> list[Block]:
    if sizes.ring == 1:
        call = Call(sizes.tokens, sizes.tokens, causal=True)
        grads = [ledger.make(name, num_bytes) for name, num_bytes in _gradient_sizes(sizes)] if sizes.packed else []
        calls = window_calls(sizes) if sizes.window else [call]
        is_cut = bool(sizes.window) or len(list(within_reach(sizes, calls, row))) > 1
        found = _cut_backward(ledger, sizes, calls, row) if is_cut else kernel_backward(ledger, sizes, call)
        if not sizes.packed:
            return found
        ledger.free(*found)
        return grads
    if sizes.gathers_kv:
        return _gathered_backward(ledger, sizes, row)
    both = 2 * kv_bytes(sizes)
    both_wide = both // sizes.narrow * sizes.wide
    kv = ledger.make("k and v", both)
    dq = ledger.make("dq sum", q_bytes(sizes) // sizes.narrow * sizes.wide)
    dkv = ledger.make("dk and dv sum", both_wide)
    sent: Block | None = None
    steps = different_steps(sizes)
    for step in steps:
        incoming = ledger.make("k and v", both) if step < steps[-1] else None
        _sum_calls(ledger, sizes, ring_calls(sizes, step), row, sent)
        sent, dkv = dkv, ledger.make("dk and dv received", both_wide)
        if incoming is not None:
            ledger.free(kv)
            kv = incoming
    ledger.free(sent)
    if not sizes.mixed:
        ledger.free(kv)
        return [dq, dkv]
    grads = [ledger.make("dk and dv", both), ledger.make("dq", q_bytes(sizes))]
    ledger.free(dq, dkv, kv)
    return grads


def _cut_backward(ledger: Ledger, sizes: LayerSizes, calls: list[Call], row: int) -> list[Block]:
    """Return the gradients of one document that takes several calls, summed in the wide dtype."""
    sums = [
        ledger.make(f"{name} sum", num_bytes // sizes.narrow * sizes.wide) for name, num_bytes in _gradient_sizes(sizes)
    ]
    _sum_calls(ledger, sizes, calls, row)
    if not sizes.mixed or sizes.packed:
        return sums
    grads = [ledger.make(name, num_bytes) for name, num_bytes in _gradient_sizes(sizes)]
    ledger.free(*sums)
    return grads


def _gathered_backward(ledger: Ledger, sizes: LayerSizes, row: int) -> list[Block]:
    kv = _gather(ledger, sizes)
    dq = ledger.make("dq sum", q_bytes(sizes) // sizes.narrow * sizes.wide)
    dkv = ledger.make("dk and dv sum", kv.num_bytes // sizes.narrow * sizes.wide)
    _sum_calls(ledger, sizes, gathered_calls(sizes), row)
    ledger.free(kv)
    ordered = ledger.make("dk and dv to send", dkv.num_bytes)
    ledger.free(dkv)
    own = scattered(ledger, sizes.ring, "dk and dv", ordered)
    return [
        _narrowed(ledger, sizes, "dk and dv", 2 * kv_bytes(sizes), own),
        _narrowed(ledger, sizes, "dq", q_bytes(sizes), dq),
    ]


def _sum_calls(ledger: Ledger, sizes: LayerSizes, calls: Iterable[Call], row: int, sent: Block | None = None) -> None:
    """Add the gradients of calls to sums. `sent`: sums that are on their way until the first kernel has run."""
    for call in within_reach(sizes, calls, row):
        parts = kernel_backward(ledger, sizes, call)
        ledger.free(sent)
        sent = None
        if sizes.mixed:
            for part in parts:
                ledger.scratch(("wide part", part.num_bytes // sizes.narrow * sizes.wide))
        ledger.free(*parts)


def _gather(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return k and v of the whole sequence, in natural order."""
    packed = ledger.make("k and v", 2 * kv_bytes(sizes))
    whole = all_gather(ledger, sizes.ring, "k and v gathered", sizes.ring * packed.num_bytes)
    ledger.free(packed)
    ordered = ledger.make("k and v gathered", sizes.ring * packed.num_bytes)
    ledger.free(whole)
    return ordered


def _gradient_sizes(sizes: LayerSizes) -> tuple[tuple[str, int], ...]:
    return ("dq", q_bytes(sizes)), ("dk", kv_bytes(sizes)), ("dv", kv_bytes(sizes))

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


def attention_forward(ledger: Ledger, z: LayerSizes, placed: bool = False) -> tuple[Block, Block]:
    """Return (output, log-sum-exp). A `placed` output is written to a slot, which exists already: its block is empty.

    Both blocks of a gated delta net are empty, because its output is always placed.
    """
    if z.delta:
        delta_forward(ledger, z)
        return ledger.make("attention_out", 0), ledger.make("lse", 0)
    if z.a2a == 1:
        return _ring_forward(ledger, z, placed)
    inner, shared = exchanged(z), z.tokens * z.narrow
    heads = split_heads(ledger, z.qkv * shared)
    inner_out, lse = _ring_forward(ledger, inner, placed=False)
    (out,) = join_heads(ledger, z, (z.q, 1 if placed else inner.heads))  # a copy into the slot takes no memory
    ledger.free(inner_out, heads)
    return _left(ledger, out, placed), lse


def attention_backward(ledger: Ledger, z: LayerSizes) -> list[Block]:
    """Return the gradients of q, k and v, in one tensor if one message carries them; for a delta net that of qkv."""
    if z.delta:
        return [delta_backward(ledger, z)]
    return _with_exchange(ledger, z, z.qkv + 2 * z.q, lambda inner, row: _ring_backward(ledger, inner, row))


def rows_forward_placed(ledger: Ledger, z: LayerSizes, before: int) -> Block:
    """Return the log-sum-exp of the `z.tokens` queries of a tile; empty for a gated delta net.

    The tile is split over cp ranks, which have `before` tokens before it in all. The output is in a slot; keys and
    values are in their store.
    """
    if z.delta:
        return attention_forward(ledger, z, placed=True)[1]
    if z.a2a == 1:
        gather_rows(ledger, z)
        return _rows_forward(ledger, z, before, placed=True)[1]
    heads = split_heads(ledger, z.qkv * z.tokens * z.narrow)
    inner_out, lse = _rows_forward(ledger, exchanged(z), before, placed=False)
    (out,) = join_heads(ledger, z, (z.q, 1))
    ledger.free(inner_out, heads, out)
    return lse


def gather_rows(ledger: Ledger, z: LayerSizes) -> None:
    """Gather keys and values of a tile, which go to their store."""
    ledger.free(all_gather(ledger, z.ring, "k and v gathered", z.ring * 2 * kv_bytes(z)))


def _rows_forward(ledger: Ledger, z: LayerSizes, before: int, placed: bool) -> tuple[Block, Block]:
    found = _attended(ledger, z, rows_calls(z, before), placed)
    _sinks_scratch(ledger, z, backward=False)
    return found


def rows_backward(ledger: Ledger, z: LayerSizes, before: int) -> list[Block]:
    """Return the gradients of a tile's queries, keys and values; for a delta net the gradient of qkv.

    The sums of gradients of keys and values are in their store."""
    if z.delta:
        return attention_backward(ledger, z)
    return _with_exchange(ledger, z, 3 * z.q, lambda inner, row: _rows_backward(ledger, inner, before, row))


def _rows_backward(ledger: Ledger, z: LayerSizes, before: int, row: int) -> list[Block]:
    dq = ledger.make("dq sum", q_bytes(z) // z.narrow * z.wide)
    _sum_calls(ledger, z, short_calls(rows_calls(z, before), BACKWARD_KEYS_PER_QUERY * z.tokens), row)
    dq = _narrowed(ledger, z, "dq", q_bytes(z), dq)
    own = None
    if z.ring > 1:
        ordered = ledger.make("dk and dv to send", z.ring * 2 * kv_bytes(z) // z.narrow * z.wide)
        own = scattered(ledger, z.ring, "dk and dv", ordered)
    if own is None and not z.mixed:
        return [dq]
    return [dq, _narrowed(ledger, z, "dk and dv", 2 * kv_bytes(z), own)]


def _with_exchange(
    ledger: Ledger, z: LayerSizes, width: int, backward: Callable[[LayerSizes, int], list[Block]]
) -> list[Block]:
    """Run `backward`, between the two all-to-alls if ranks exchange heads.

    `backward` is called with the elements between two tokens of its inputs. `width`: width of all tensors that the
    first all-to-all carries, as one tensor.
    """
    if z.a2a == 1:
        _sinks_scratch(ledger, z, backward=True)
        return backward(z, fused_row(z))
    inner = exchanged(z)
    heads = split_heads(ledger, width * z.tokens * z.narrow)
    _sinks_scratch(ledger, inner, backward=True)
    inner_grads = backward(inner, max(fused_row(inner), z.batch * width // z.a2a))
    grads = join_heads(ledger, z, (z.q, inner.heads), (z.kv, inner.kv_heads), (z.kv, inner.kv_heads))
    ledger.free(*inner_grads, heads)
    return grads


def _left(ledger: Ledger, out: Block, placed: bool) -> Block:
    """Return the block of an output that the kernel writes to a new tensor: empty once it is copied to its place."""
    if not placed:
        return out
    ledger.free(out)
    return ledger.make(out.name, 0)


def _sinks_scratch(ledger: Ledger, z: LayerSizes, backward: bool) -> None:
    """Scratch memory to join the sinks (memo.attention.sinks). CPUs cast the factors; a backward casts on its own."""
    tokens, casts = min(SINK_TOKENS, z.tokens), z.mixed * (not z.on_cuda)
    copies = 1 + z.mixed + casts if backward else 2 * casts
    if z.sinks:
        ledger.scratch(("sinks", copies * tokens * z.q * z.wide), ("weights of sinks", lse_bytes(z, tokens)))


def _ring_forward(ledger: Ledger, z: LayerSizes, placed: bool) -> tuple[Block, Block]:
    found = _without_sinks(ledger, z, placed)
    _sinks_scratch(ledger, z, backward=False)
    return found


def _without_sinks(ledger: Ledger, z: LayerSizes, placed: bool) -> tuple[Block, Block]:
    if z.ring == 1:
        calls = window_calls(z) if z.window else [Call(z.tokens, z.tokens, causal=True)]
        return _attended(ledger, z, calls, placed)
    if z.gathers_kv:
        gathered = _gather(ledger, z)
        out, lse = _attended(ledger, z, gathered_calls(z), placed)
        ledger.free(gathered)
        return out, lse
    kv = ledger.make("k and v", 2 * kv_bytes(z))
    merger = _start_merger(ledger, z, placed)
    steps = different_steps(z)
    for step in steps:
        incoming = ledger.make("k and v", 2 * kv_bytes(z)) if step < steps[-1] else None
        _merge_calls(ledger, z, ring_calls(z, step))
        if incoming is not None:
            ledger.free(kv)
            kv = incoming
    out, lse = _merged(ledger, z, *merger, placed)
    ledger.free(kv)
    return out, lse


def _attended(ledger: Ledger, z: LayerSizes, calls: list[Call], placed: bool) -> tuple[Block, Block]:
    if z.packed:
        results = (
            ledger.make("attention_out", 0 if placed else q_bytes(z)),
            ledger.make("lse", lse_bytes(z, z.tokens)),
        )
        ledger.free(*_attended(ledger, z._replace(packed=False), calls, placed=True))
        return results
    if len(list(within_reach(z, calls, fused_row(z)))) == 1:
        made, lse = kernel_forward(ledger, z, calls[0])
        return _left(ledger, made, placed), lse
    merger = _start_merger(ledger, z, placed)
    _merge_calls(ledger, z, calls)
    return _merged(ledger, z, *merger, placed)


def _start_merger(ledger: Ledger, z: LayerSizes, placed: bool) -> tuple[Block, Block]:
    """Return the sum of outputs, empty if it is computed in the output's place, and the log-sum-exp."""
    in_place = placed and not z.mixed
    total = ledger.make("merged output", 0 if in_place else q_bytes(z) // z.narrow * z.wide)
    return total, ledger.make("lse", lse_bytes(z, z.tokens))


def _merged(ledger: Ledger, z: LayerSizes, total: Block, lse: Block, placed: bool) -> tuple[Block, Block]:
    return _narrowed(ledger, z, "attention_out", 0 if placed else q_bytes(z), total), lse


def _narrowed(ledger: Ledger, z: LayerSizes, name: str, num_bytes: int, total: Block | None) -> Block:
    """Cast a sum in the wide dtype to the model's dtype; None: the sum is in memory that is not counted here."""
    if total is not None and not z.mixed:
        return total
    narrow = ledger.make(name, num_bytes)
    ledger.free(total)
    return narrow


def _merge_calls(ledger: Ledger, z: LayerSizes, calls: list[Call]) -> None:
    """Merge the outputs of calls; the output of a call is freed when that of the next call exists."""
    previous: tuple[Block, ...] = ()
    for call in within_reach(z, calls, fused_row(z)):
        part = kernel_forward(ledger, z, call)
        ledger.free(*previous)
        previous = part
        rows = call.queries * z.q
        lse = ledger.make("merged lse", lse_bytes(z, call.queries))
        weight = ledger.make("merge weight", lse.num_bytes)
        cast = ledger.make("wide output", rows * z.wide) if z.mixed else None
        product = ledger.make("weighted output", rows * z.wide)
        ledger.free(cast, weight, product, lse)
    ledger.free(*previous)


def _ring_backward(ledger: Ledger, z: LayerSizes, row: int) -> list[Block]:
    if z.ring == 1:
        call = Call(z.tokens, z.tokens, causal=True)
        grads = [ledger.make(name, num_bytes) for name, num_bytes in _gradient_sizes(z)] if z.packed else []
        calls = window_calls(z) if z.window else [call]
        is_cut = bool(z.window) or len(list(within_reach(z, calls, row))) > 1
        found = _cut_backward(ledger, z, calls, row) if is_cut else kernel_backward(ledger, z, call)
        if not z.packed:
            return found
        ledger.free(*found)
        return grads
    if z.gathers_kv:
        return _gathered_backward(ledger, z, row)
    both = 2 * kv_bytes(z)
    both_wide = both // z.narrow * z.wide
    kv = ledger.make("k and v", both)
    met: Block | None = None  # k and v of the last step, which live until k and v of the next step are used
    dq = ledger.make("dq sum", q_bytes(z) // z.narrow * z.wide)
    shift: tuple[Block, ...] = ()
    steps = different_steps(z)
    for step in steps:
        incoming = ledger.make("k and v", both) if step < steps[-1] else None
        dkv = ledger.make("dk and dv sum", both_wide)
        ledger.free(met)
        _sum_calls(ledger, z, ring_calls(z, step), row)
        received = ledger.make("dk and dv received", both_wide)
        ledger.free(*reversed(shift))
        shift = (dkv, received)
        if incoming is None:
            break
        met, kv = kv, incoming
    if not z.mixed:
        ledger.free(dkv, kv)
        return [dq, received]
    grads = [ledger.make("dk and dv", both), ledger.make("dq", q_bytes(z))]
    ledger.free(dq, received, dkv, kv)
    return grads


def _cut_backward(ledger: Ledger, z: LayerSizes, calls: list[Call], row: int) -> list[Block]:
    """Return the gradients of one document that takes several calls, summed in the wide dtype."""
    sums = [ledger.make(f"{name} sum", num_bytes // z.narrow * z.wide) for name, num_bytes in _gradient_sizes(z)]
    _sum_calls(ledger, z, calls, row)
    if not z.mixed or z.packed:
        return sums
    grads = [ledger.make(name, num_bytes) for name, num_bytes in _gradient_sizes(z)]
    ledger.free(*sums)
    return grads


def _gathered_backward(ledger: Ledger, z: LayerSizes, row: int) -> list[Block]:
    kv = _gather(ledger, z)
    dq = ledger.make("dq sum", q_bytes(z) // z.narrow * z.wide)
    dkv = ledger.make("dk and dv sum", kv.num_bytes // z.narrow * z.wide)
    _sum_calls(ledger, z, gathered_calls(z), row)
    ordered = ledger.make("dk and dv to send", dkv.num_bytes)
    own = scattered(ledger, z.ring, "dk and dv", ordered)
    grads = [_narrowed(ledger, z, "dk and dv", 2 * kv_bytes(z), own), _narrowed(ledger, z, "dq", q_bytes(z), dq)]
    ledger.free(dkv, kv)
    return grads


def _sum_calls(ledger: Ledger, z: LayerSizes, calls: Iterable[Call], row: int) -> None:
    previous: list[Block] = []
    for call in within_reach(z, calls, row):
        parts = kernel_backward(ledger, z, call)
        ledger.free(*previous)
        previous = parts
        if z.mixed:
            for part in parts:
                ledger.scratch(("wide part", part.num_bytes // z.narrow * z.wide))
    ledger.free(*previous)


def _gather(ledger: Ledger, z: LayerSizes) -> Block:
    """Return k and v of the whole sequence, in natural order."""
    packed = ledger.make("k and v", 2 * kv_bytes(z))
    whole = all_gather(ledger, z.ring, "k and v gathered", z.ring * packed.num_bytes)
    ledger.free(packed)
    ordered = ledger.make("k and v gathered", z.ring * packed.num_bytes)
    ledger.free(whole)
    return ordered


def _gradient_sizes(z: LayerSizes) -> tuple[tuple[str, int], ...]:
    return ("dq", q_bytes(z)), ("dk", kv_bytes(z)), ("dv", kv_bytes(z))

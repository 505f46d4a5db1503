"""One call of attention's kernel (memo.attention): its inputs, outputs and copies, forward and backward."""

from memo.estimate.program.attention_calls import Call
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.spec.attention_workspace import AttentionCall, backward_workspace, padding_rows, squares_bytes


def kernel_forward(ledger: Ledger, sizes: LayerSizes, call: Call) -> tuple[Block, Block]:
    flipped = _flipped(ledger, sizes, call, sizes.q + 2 * sizes.kv)
    out, lse = _outputs(ledger, sizes, call)
    _kernel_scratch(ledger, sizes, call)
    ledger.free(flipped)
    if not call.flipped:
        return out, lse
    turned = _outputs(ledger, sizes, call)
    ledger.free(out, lse)
    return turned


def _flipped(ledger: Ledger, sizes: LayerSizes, call: Call, width: int, lse: bool = False) -> Block:
    """Copy the inputs of a flipped call; `width`: width of all inputs besides the log-sum-exp."""
    num_bytes = call.queries * width * sizes.narrow + (lse_bytes(sizes, call.queries) if lse else 0)
    return ledger.make("flipped for attention", num_bytes if call.flipped else 0)


def _outputs(ledger: Ledger, sizes: LayerSizes, call: Call) -> tuple[Block, Block]:
    out = ledger.make("attention_out", call.queries * sizes.q * sizes.narrow)
    return out, ledger.make("lse", lse_bytes(sizes, call.queries))


def kernel_backward(ledger: Ledger, sizes: LayerSizes, call: Call) -> list[Block]:
    """Return dq, dk and dv. On GPUs the log-sum-exp of a part of the queries is a copy."""
    is_part = sizes.on_cuda and sizes.heads > 1 and (sizes.packed or call.queries < sizes.tokens)
    saved = _flipped(ledger, sizes, call, 2 * sizes.q + 2 * sizes.kv, lse=True)
    grad_out = _flipped(ledger, sizes, call, sizes.q)
    lse = ledger.make("lse", lse_bytes(sizes, call.queries) if is_part else 0)
    copies = ledger.make("copied for attention", _copied_bytes(sizes, call))
    grads = [ledger.make("dq", call.queries * sizes.q * sizes.narrow)]
    grads += [ledger.make(name, call.keys * sizes.kv * sizes.narrow) for name in ("dk", "dv")]
    if sizes.on_cuda and sizes.attention != "torch":
        sequences, rows, keys = call.shape(sizes.batch)
        rows += padding_rows(sizes.attention) if sizes.packed and call.causal and not call.strip else 0
        kernel_call = _sized(sizes, sequences, rows, keys)
        ledger.scratch(*backward_workspace(sizes.attention, kernel_call, sizes.deterministic).items())
    else:
        _kernel_scratch(ledger, sizes, call, backward=True)
    ledger.free(copies, lse, grad_out)
    turned = [ledger.make(each.name, each.num_bytes) for each in grads] if call.flipped else []
    ledger.free(saved, *(grads if turned else ()))
    return turned or grads


def _copied_bytes(sizes: LayerSizes, call: Call) -> int:
    """Bytes that a kernel copies because they are strided: with several sequences, or after an all-to-all.

    The CPU's kernel copies the output's gradient, FlashAttention in torch also the output; transformer_engine gets
    copies of all tensors.
    """
    of_queries, of_keys = (
        tokens * width * sizes.narrow for tokens, width in ((call.queries, sizes.q), (call.keys, sizes.kv))
    )
    if sizes.attention == "te":
        return 3 * of_queries + 2 * of_keys
    return {"cpu": 1, "flash": 2}.get(sizes.attention, 0) * of_queries if sizes.batch > 1 or sizes.a2a > 1 else 0


def _kernel_scratch(ledger: Ledger, sizes: LayerSizes, call: Call, backward: bool = False) -> None:
    """Request the scratch memory of torch's flash kernel on CPUs, or of torch's operations: an upper bound.

    Each thread works on a block of queries and a block of keys. The forward counts as much as the backward: scores and
    their gradients, wide and narrow, and for each query the sums and the output.
    """
    if sizes.attention == "torch":
        squares = squares_bytes(
            _sized(sizes, *call.shape(sizes.batch)), sizes.wide, sizes.on_cuda, call.causal, backward
        )
        ledger.scratch(("attention squares", squares))
        return
    _, queries, keys = call.shape(sizes.batch)
    queries, keys = min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, keys)
    scores = 2 * queries * keys * (sizes.wide + (sizes.narrow if sizes.mixed else 0))
    ledger.scratch(("attention scratch", sizes.threads * (scores + queries * (2 + sizes.head_dim) * sizes.wide)))


def _sized(sizes: LayerSizes, sequences: int, rows: int, keys: int) -> AttentionCall:
    return AttentionCall(sequences, rows, keys, sizes.heads, sizes.kv_heads, sizes.head_dim, sizes.narrow)


def q_bytes(sizes: LayerSizes) -> int:
    return sizes.tokens * sizes.q * sizes.narrow


def kv_bytes(sizes: LayerSizes) -> int:
    return sizes.tokens * sizes.kv * sizes.narrow


def lse_bytes(sizes: LayerSizes, tokens: int) -> int:
    return tokens * sizes.heads * sizes.wide

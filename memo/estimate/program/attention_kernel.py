"""One call of attention's kernel (memo.attention): its inputs, outputs and copies, forward and backward."""

from memo.estimate.program.attention_calls import Call
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.spec.attention_workspace import AttentionCall, backward_workspace, padding_rows


def kernel_forward(ledger: Ledger, z: LayerSizes, call: Call) -> tuple[Block, Block]:
    flipped = _flipped(ledger, z, call, z.q + 2 * z.kv)
    out, lse = _kernel_outputs(ledger, z, call)
    ledger.free(flipped)
    if not call.flipped:
        return out, lse
    turned = _outputs(ledger, z, call)
    ledger.free(out, lse)
    return turned


def _flipped(ledger: Ledger, z: LayerSizes, call: Call, width: int, lse: bool = False) -> Block:
    """Copy the inputs of a flipped call; `width`: width of all inputs besides the log-sum-exp."""
    num_bytes = call.queries * width * z.narrow + (lse_bytes(z, call.queries) if lse else 0)
    return ledger.make("flipped for attention", num_bytes if call.flipped else 0)


def _outputs(ledger: Ledger, z: LayerSizes, call: Call) -> tuple[Block, Block]:
    out = ledger.make("attention_out", call.queries * z.q * z.narrow)
    return out, ledger.make("lse", lse_bytes(z, call.queries))


def _kernel_outputs(ledger: Ledger, z: LayerSizes, call: Call) -> tuple[Block, Block]:
    out, lse = _outputs(ledger, z, call)
    _kernel_scratch(ledger, z, call)
    return out, lse


def kernel_backward(ledger: Ledger, z: LayerSizes, call: Call) -> list[Block]:
    """Return dq, dk and dv. On GPUs the log-sum-exp of a part of the queries is a copy."""
    is_part = z.on_cuda and z.heads > 1 and (z.packed or call.queries < z.tokens)
    saved = _flipped(ledger, z, call, 2 * z.q + 2 * z.kv, lse=True)
    grad_out = _flipped(ledger, z, call, z.q)
    lse = ledger.make("lse", lse_bytes(z, call.queries) if is_part else 0)
    copies = ledger.make("copied for attention", _copied_bytes(z, call))
    grads = [ledger.make("dq", call.queries * z.q * z.narrow)]
    grads += [ledger.make(name, call.keys * z.kv * z.narrow) for name in ("dk", "dv")]
    if z.on_cuda:
        sizes = (z.heads, z.kv_heads, z.head_dim, z.narrow)
        sequences, rows, keys = call.shape(z.batch)
        rows += padding_rows(z.attention) if z.packed and call.causal and not call.strip else 0
        kernel_call = AttentionCall(sequences, rows, keys, *sizes)
        ledger.scratch(*backward_workspace(z.attention, kernel_call, z.deterministic).items())
    else:
        _kernel_scratch(ledger, z, call)
    ledger.free(copies, lse, grad_out)
    turned = [ledger.make(each.name, each.num_bytes) for each in grads] if call.flipped else []
    ledger.free(saved, *(grads if turned else ()))
    return turned or grads


def _copied_bytes(z: LayerSizes, call: Call) -> int:
    """Bytes that a kernel copies because they are strided: with several sequences, or after an all-to-all.

    The CPU's kernel copies the output's gradient, FlashAttention in torch also the output; transformer_engine gets
    copies of all tensors.
    """
    of_queries, of_keys = (tokens * width * z.narrow for tokens, width in ((call.queries, z.q), (call.keys, z.kv)))
    if z.attention == "te":
        return 3 * of_queries + 2 * of_keys
    return {"cpu": 1, "flash": 2}.get(z.attention, 0) * of_queries if z.batch > 1 or z.a2a > 1 else 0


def _kernel_scratch(ledger: Ledger, z: LayerSizes, call: Call) -> None:
    """Request the scratch memory of torch's flash kernel on CPUs: an upper bound.

    Each thread works on a block of queries and a block of keys. The forward counts as much as the backward: scores and
    their gradients, wide and narrow, and for each query the sums and the output.
    """
    _, queries, keys = call.shape(z.batch)
    queries, keys = min(256 if queries >= 768 else 64 if queries >= 192 else 32, queries), min(512, keys)
    scores = 2 * queries * keys * (z.wide + (z.narrow if z.mixed else 0))
    ledger.scratch(("attention scratch", z.threads * (scores + queries * (2 + z.head_dim) * z.wide)))


def q_bytes(z: LayerSizes) -> int:
    return z.tokens * z.q * z.narrow


def kv_bytes(z: LayerSizes) -> int:
    return z.tokens * z.kv * z.narrow


def lse_bytes(z: LayerSizes, tokens: int) -> int:
    return tokens * z.heads * z.wide

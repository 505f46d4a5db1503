"""A gated delta net of one context-parallel rank (memo.parallel.context_delta): what its groups of tokens take.

What a group takes is a bound, fitted to what torch's CPU kernels asked for at heads of 16, 64 and 128, with one and two
value heads a key head: up to 6 % more than was measured (tests/estimate/test_estimate_program_memory.py).
"""

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.spec.delta import CHUNK, GROUP, carry_size


def group_bytes(z: LayerSizes, backward: bool) -> int:
    """Of the tensors that one group of tokens makes."""
    d, channels = z.head_dim, z.head_dim + 2 * z.kv // z.heads
    if backward:
        elements = 18.4 * d + 4.1 * channels + 7.6 * CHUNK + 1.1 * d * d / CHUNK
    else:
        elements = 12.6 * d + 2.1 * channels + 2.4 * CHUNK
    return int(min(z.tokens, GROUP * z.batch) * z.heads * elements * z.wide)


def carry_bytes(z: LayerSizes) -> int:
    return z.batch * carry_size(z.heads, z.kv_heads, z.head_dim) * z.wide


def run_forward(ledger: Ledger, z: LayerSizes) -> None:
    """Of `z.tokens` tokens, all of them of the heads of this rank; the output has its place."""
    carry = ledger.make("carry", carry_bytes(z))
    ledger.pulse(("group of a delta net", group_bytes(z, backward=False)))
    ledger.free(carry)


def run_backward(ledger: Ledger, z: LayerSizes) -> Block:
    """The gradient of what the net reads."""
    grad = ledger.make("delta net gradient", z.tokens * z.qkv * z.narrow)
    groups = -(-z.tokens // (GROUP * z.batch))
    carries = ledger.make("carries", (groups + 2) * carry_bytes(z))
    ledger.pulse(("group of a delta net", group_bytes(z, backward=True)))
    ledger.free(carries)
    return grad

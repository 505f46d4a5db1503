"""Column- and row-parallel matrices (memo.executor.pieces), and gradients of weights."""

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import scattered
from memo.estimate.program.sizes import LayerSizes


def multiply(ledger: Ledger, z: LayerSizes, elements: int) -> None:
    """The scratch memory of a matrix product; its result, of so many elements, is the caller's.

    A stated bound for CPUs. In bf16 and fp16 oneDNN sums in a wider copy of the result, packs operands, which takes
    less except where all of a step is small (0.2 MiB a thread), or needs nothing, as the CPU's instructions are.

    Known error of a step's peak: 4.6 % above in a plain GPT of 46 MB where the bound is not used, 1 % below in 7 MB.
    """
    if z.mixed and not z.on_cuda:
        ledger.pulse(("matrix scratch", elements * z.wide))


def add_gradient(ledger: Ledger, z: LayerSizes, size: int) -> None:
    """A gradient of `size` elements that is added to the main gradient, cast first if that is wider; the product that
    computes it takes no more."""
    gradient = ledger.make("weight gradient", size * z.narrow)
    if z.mixed:
        ledger.pulse(("wide weight gradient", size * z.wide))
    ledger.free(gradient)


def hidden_bytes(z: LayerSizes, tokens: int) -> int:
    """Bytes of the hidden states of `tokens` tokens, gathered over tp."""
    return tokens * z.hidden * z.narrow


def row_forward(ledger: Ledger, z: LayerSizes, tokens: int) -> Block:
    """Output of a row-parallel matrix; its input belongs to the caller."""
    partial = ledger.make("row output", hidden_bytes(z, tokens))
    multiply(ledger, z, tokens * z.hidden)
    out = scattered(ledger, z.tp, "row output", partial)
    if z.linear_bias:
        biased = ledger.make("row output", out.num_bytes)
        ledger.free(out)
        out = biased
    return out

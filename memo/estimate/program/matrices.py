"""Column- and row-parallel matrices (memo.executor.pieces), and gradients of weights.

Widths are those of this tp rank. `inside` is the width between a column-parallel matrix and the row-parallel one that
follows it, in elements per token.
"""

from typing import NamedTuple

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import scattered
from memo.estimate.program.sizes import LayerSizes


class Matrix(NamedTuple):
    """A matrix between hidden states and `inside`, in one direction or the other; `bias`: whether it has one."""

    inside: int
    bias: bool


def matrices(z: LayerSizes) -> dict[str, Matrix]:
    """Those of memo's own layer, by module."""
    return {
        "attention.qkv": Matrix(z.qkv, z.qkv_bias),
        "attention.projection": Matrix(z.q, z.linear_bias),
        "mlp.fc1": Matrix(z.fc1, z.linear_bias),
        "mlp.fc2": Matrix(z.ffn, z.linear_bias),
    }


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


def row_forward(ledger: Ledger, z: LayerSizes, matrix: Matrix, tokens: int) -> Block:
    """Output of a row-parallel matrix; its input belongs to the caller."""
    partial = ledger.make("row output", hidden_bytes(z, tokens))
    multiply(ledger, z, tokens * z.hidden)
    out = scattered(ledger, z.tp, "row output", partial)
    if matrix.bias:
        biased = ledger.make("row output", out.num_bytes)
        ledger.free(out)
        out = biased
    return out

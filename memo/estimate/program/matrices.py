"""Column- and row-parallel matrices (memo.executor.pieces), and gradients of weights.

Widths are those of this tp rank. `inside` is the width between a column-parallel matrix and the row-parallel one that
follows it, in elements per token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import reduce_scatter
from memo.estimate.program.products import LinearProducts, Product
from memo.estimate.program.sizes import LayerSizes


class Matrix(NamedTuple):
    """A matrix between hidden states and `inside`, in one direction or the other; `bias`: whether it has one."""

    inside: int
    bias: bool

    def column(self, z: LayerSizes) -> LinearProducts:
        return LinearProducts(z.hidden, self.inside, self.bias)

    def row(self, z: LayerSizes) -> LinearProducts:
        """The bias is not part of the product: it is added after the sum over the tp ranks."""
        return LinearProducts(self.inside, z.hidden)


def matrices(z: LayerSizes) -> dict[str, Matrix]:
    """Those of memo's own layer, by module."""
    return {
        "attention.qkv": Matrix(z.qkv, z.qkv_bias),
        "attention.projection": Matrix(z.q, z.linear_bias),
        "mlp.fc1": Matrix(z.fc1, z.linear_bias),
        "mlp.fc2": Matrix(z.ffn, z.linear_bias),
    }


def multiply(ledger: Ledger, z: LayerSizes, product: Product) -> None:
    """The scratch memory of a matrix product; its result is the caller's."""
    num_bytes = z.scratch(product)
    if num_bytes:
        ledger.pulse(("matrix scratch", num_bytes))


def add_gradient(
    ledger: Ledger, z: LayerSizes, size: int, product: Product | None = None, freed: Sequence[Block | None] = ()
) -> None:
    """A gradient of `size` elements, which autograd's hook adds to the main gradient, cast first if that is wider.

    It is computed by `product` if that is given. `freed` are blocks that are freed once it is computed.
    """
    gradient = ledger.make("weight gradient", size * z.narrow)
    if product is not None:
        multiply(ledger, z, product)
    ledger.free(*freed)
    if z.mixed:
        ledger.pulse(("wide weight gradient", size * z.wide))
    ledger.free(gradient)


def weight_gradient(ledger: Ledger, z: LayerSizes, product: Product, *freed: Block | None) -> None:
    """The weight gradient that `product` computes, as `add_gradient`; on GPUs `product` itself adds to the main one."""
    if z.on_cuda:
        multiply(ledger, z, product)
        ledger.free(*freed)
    else:
        add_gradient(ledger, z, product.rows * product.columns, product, freed)


def hidden_bytes(z: LayerSizes, tokens: int) -> int:
    """Bytes of the hidden states of `tokens` tokens, gathered over tp."""
    return tokens * z.hidden * z.narrow


def row_forward(ledger: Ledger, z: LayerSizes, matrix: Matrix, tokens: int) -> Block:
    """Output of a row-parallel matrix; its input belongs to the caller."""
    partial = ledger.make("row output", hidden_bytes(z, tokens))
    multiply(ledger, z, matrix.row(z).forward(tokens))
    out, copy = reduce_scatter(ledger, z.tp, "row output", partial)
    if z.tp > 1:
        ledger.free(partial)
        ledger.free_late(copy)
    if matrix.bias:
        biased = ledger.make("row output", out.num_bytes)
        ledger.free(out)
        out = biased
    return out

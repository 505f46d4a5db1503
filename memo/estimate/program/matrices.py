"""Column- and row-parallel matrices under autograd (memo.parallel.tensor), forward and backward.

Widths are those of this tp rank. `inside` is the width between a column-parallel matrix and the row-parallel one that
follows it, in elements per token.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import all_gather, reduce_scatter
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


def column_forward(ledger: Ledger, z: LayerSizes, matrix: Matrix, name: str, x: Block, tokens: int) -> Block:
    """Output of a column-parallel matrix; x belongs to the caller."""
    gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tokens), x)
    out = ledger.make(name, tokens * matrix.inside * z.narrow)
    multiply(ledger, z, matrix.column(z).forward(tokens))
    ledger.free(None if gathered is x else gathered)
    return out


def column_backward(ledger: Ledger, z: LayerSizes, matrix: Matrix, grad: Block, x: Block, tokens: int) -> Block:
    """Gradient of x; frees `grad` and x."""
    whole = hidden_bytes(z, tokens)
    gathered = all_gather(ledger, z.tp, "gathered", whole, x)
    grad_gathered = ledger.make("column gradient", whole)
    multiply(ledger, z, matrix.column(z).input_gradient(tokens))
    grad_x, copy = reduce_scatter(ledger, z.tp, "column gradient", grad_gathered)
    product = matrix.column(z).weight_gradient(tokens)
    if z.tp == 1:
        weight_gradient(ledger, z, product, grad, x)
    else:
        weight_gradient(ledger, z, product, gathered, grad_gathered, copy, grad, x)
    return grad_x


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


def row_backward(ledger: Ledger, z: LayerSizes, matrix: Matrix, grad: Block, x: Block | None, tokens: int) -> Block:
    """Gradient of x; frees x, while `grad` belongs to the caller."""
    gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tokens), grad)
    grad_x = ledger.make("row gradient", tokens * matrix.inside * z.narrow)
    multiply(ledger, z, matrix.row(z).input_gradient(tokens))
    weight_gradient(ledger, z, matrix.row(z).weight_gradient(tokens), None if gathered is grad else gathered, x)
    return grad_x

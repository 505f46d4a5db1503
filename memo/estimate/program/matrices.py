"""Column- and row-parallel matrices under autograd (memo.parallel.tensor): forward and back.

Widths are those of this tp rank; `inside` counts the elements a token between the two matrices of a pair.
"""

from dataclasses import dataclass

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import all_gather, reduce_scatter
from memo.estimate.program.products import Linear, Product
from memo.estimate.program.sizes import LayerSizes


@dataclass(frozen=True)
class Matrix:
    """Between hidden states and `inside`; `bias` of the output."""

    inside: int
    bias: bool

    def column(self, z: LayerSizes) -> Linear:
        return Linear(z.hidden, self.inside, self.bias)

    def row(self, z: LayerSizes) -> Linear:
        """Its bias is added once the parts of all tp ranks are."""
        return Linear(self.inside, z.hidden)


def multiply(ledger: Ledger, z: LayerSizes, product: Product) -> None:
    """What a matrix product takes beside its result, which is there already."""
    ledger.pulse(("matrix scratch", z.scratch(product)))


def weight_gradient(ledger: Ledger, z: LayerSizes, product: Product, *dropped: Block | None) -> None:
    """Made, then what only it needed is dropped, then it is added to the main gradient, cast if that is wider."""
    size = product.rows * product.columns
    gradient = ledger.make("weight gradient", size * z.narrow)
    multiply(ledger, z, product)
    ledger.free(*dropped)
    if z.mixed:
        ledger.pulse(("wide weight gradient", size * z.wide))
    ledger.free(gradient)


def hidden_bytes(z: LayerSizes, tokens: int) -> int:
    """Hidden states of `tokens` tokens, gathered over tp."""
    return tokens * z.hidden * z.narrow


def column_forward(ledger: Ledger, z: LayerSizes, matrix: Matrix, name: str, x: Block, tokens: int) -> Block:
    """x stays with its owner."""
    gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tokens), x)
    out = ledger.make(name, tokens * matrix.inside * z.narrow)
    multiply(ledger, z, matrix.column(z).forward(tokens))
    ledger.free(None if gathered is x else gathered)
    return out


def column_backward(ledger: Ledger, z: LayerSizes, matrix: Matrix, grad: Block, x: Block, tokens: int) -> Block:
    """Gradient of x; drops `grad` and x."""
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
    """What the matrix adds to the residual; its input stays with its owner."""
    partial = ledger.make("row output", hidden_bytes(z, tokens))
    multiply(ledger, z, matrix.row(z).forward(tokens))
    out, copy = reduce_scatter(ledger, z.tp, "row output", partial)
    if z.tp > 1:
        ledger.free(copy, partial)
    if matrix.bias:
        biased = ledger.make("row output", out.num_bytes)
        ledger.free(out)
        out = biased
    return out


def row_backward(ledger: Ledger, z: LayerSizes, matrix: Matrix, grad: Block, x: Block | None, tokens: int) -> Block:
    """Gradient of x, which is dropped; `grad` stays with its owner."""
    gathered = all_gather(ledger, z.tp, "gathered", hidden_bytes(z, tokens), grad)
    grad_x = ledger.make("row gradient", tokens * matrix.inside * z.narrow)
    multiply(ledger, z, matrix.row(z).input_gradient(tokens))
    weight_gradient(ledger, z, matrix.row(z).weight_gradient(tokens), None if gathered is grad else gathered, x)
    return grad_x

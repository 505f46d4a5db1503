"""Matrix products, and the scratch memory that their library takes from torch's allocator while they run.

Its size depends on the instructions of the CPU and on the number of threads: in bf16 and fp16 oneDNN packs operands, or
sums in a wider copy of the result. No formula holds for all CPUs, so a run measures it (memo.profiler.product_scratch),
and estimates without torch leave it out.

Always left out is the scratch memory of the small products inside the backward of torch's flash kernel in bf16 and
fp16, 0.03 to 0.2 MiB for each thread (AVX-512, torch 2.13).
"""

from collections.abc import Callable
from typing import Literal, NamedTuple


class Product(NamedTuple):
    """left [rows, inner] x right [inner, columns].

    Attributes:
        kind: says which operand lies in memory as its transpose: in "forward" the right one (a weight
            [columns, inner]), in "weight gradient" the left one (the gradient of an output, [inner, rows]), in
            "input gradient" none.
        bias: whether the product itself adds one.
    """

    kind: Literal["forward", "input gradient", "weight gradient"]
    rows: int
    inner: int
    columns: int
    bias: bool = False


class LinearProducts(NamedTuple):
    """The matrix products of y [tokens, outputs] = x [tokens, inputs] W^T (+ bias) and of its backward."""

    inputs: int
    outputs: int
    bias: bool = False

    def forward(self, tokens: int) -> Product:
        return Product("forward", tokens, self.inputs, self.outputs, self.bias)

    def input_gradient(self, tokens: int) -> Product:
        return Product("input gradient", tokens, self.outputs, self.inputs)

    def weight_gradient(self, tokens: int) -> Product:
        return Product("weight gradient", self.outputs, tokens, self.inputs)


Scratch = Callable[[Product], int]
"""Gives the bytes that a product requests from torch's allocator in addition to its result."""


def uncounted(product: Product) -> int:
    """For estimates of other machines: what their CPUs request is not known."""
    return 0

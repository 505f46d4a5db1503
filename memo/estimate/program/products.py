"""Matrix products, and the scratch memory that their library takes from torch's allocator while they run.

How much that is depends on the instructions that the CPU has and on the number of threads: oneDNN packs operands of
bf16 and fp16, or sums in a wider copy of the result, as it likes best there. No formula holds for all of them, so it
is measured where torch is at hand (memo.profiler.product_scratch), and left out on paper.

Known to be left out in any case: what the small products inside the backward of torch's flash kernel take in bf16 and
fp16, 0.03 to 0.2 MiB for each thread (AVX-512, torch 2.13).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Product:
    """left [rows, inner] x right [inner, columns].

    Attributes:
        kind: which operand lies in memory as its transpose: "forward" the right one (a weight [columns, inner]),
            "weight gradient" the left one (the gradient of an output, [inner, rows]), "input gradient" none.
        bias: added by the product itself.
    """

    kind: Literal["forward", "input gradient", "weight gradient"]
    rows: int
    inner: int
    columns: int
    bias: bool = False


@dataclass(frozen=True)
class Linear:
    """y [tokens, outputs] = x [tokens, inputs] W^T (+ bias), and the products of its backward."""

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
"""Bytes that a product asks of torch's allocator beside its result."""


def uncounted(product: Product) -> int:
    """On paper: what another machine's CPU asks for is not known."""
    return 0

"""Requests of column- and row-parallel matrices (memo.executor.pieces), and of gradients of weights."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.messages import scattered
from memo.estimate.program.sizes import LayerSizes


def multiply(ledger: Ledger, sizes: LayerSizes, elements: int, experts: int = 0) -> None:
    """Request the scratch memory of a matrix product; its result, of `elements` elements, belongs to the caller.

    Of products with the matrices of several experts the largest counts: it is assumed to have twice its share of rows.

    An upper bound for CPUs. In bf16 and fp16 oneDNN sums in a wider copy of the result, or packs operands, or needs no
    scratch, depending on the CPU's instructions. Packing takes less than the bound unless the whole step is small (0.2
    MiB a thread).

    Known error of a step's peak: 4.6 % above in a plain GPT of 46 MB where the bound is not used, 1 % below in 7 MB.
    """
    if sizes.mixed and not sizes.on_cuda:
        largest = min(elements, 2 * elements // experts) if experts else elements
        ledger.scratch(("matrix scratch", largest * sizes.wide))


def add_gradient(ledger: Ledger, sizes: LayerSizes, size: int) -> None:
    """Compute a gradient of `size` elements, and add it to the main gradient; it is cast first if that is wider.

    The product that computes the gradient takes no further memory."""
    gradient = ledger.make("weight gradient", size * sizes.narrow)
    if sizes.mixed:
        ledger.scratch(("wide weight gradient", size * sizes.wide))
    ledger.free(gradient)


class AdapterSizes(NamedTuple):
    """Shapes on this rank of LoRA's matrices beside one matrix, or beside the matrix of one expert, and of how many
    experts a layer has; 0: one matrix multiplies all rows."""

    a: tuple[int, ...]
    b: tuple[int, ...]
    experts: int

    @property
    def parts(self) -> int:
        return self.a[0] // self.b[1]

    @property
    def output(self) -> int:
        """The width of what is added at a time: experts, whose parts are equal, add part by part."""
        return self.b[0] // self.parts if self.experts else self.b[0]


def adapter_of(matrices: Mapping[str, tuple[int, ...]], module: str, experts: int = 0) -> AdapterSizes | None:
    a, b = (matrices.get(f"{module}.adapter.{part}") for part in "ab")
    each = max(1, experts)
    return None if a is None or b is None else AdapterSizes((a[0] // each, a[1]), (b[0] // each, b[1]), experts)


def adapter_forward(ledger: Ledger, sizes: LayerSizes, rows: int, adapter: AdapterSizes | None) -> None:
    """Compute the adapter's output, which is added to the output (memo.parallel.adapter); `rows`: tokens, or one for
    each expert of each token."""
    if adapter is not None:
        narrow = _adapter_input(ledger, sizes, rows, adapter)
        _add_product(ledger, sizes, rows * adapter.output, adapter)
        ledger.free(narrow)


def _add_product(ledger: Ledger, sizes: LayerSizes, elements: int, adapter: AdapterSizes) -> None:
    """Add a product to existing values: in place, or the products of all experts after they are made."""
    if adapter.experts:
        ledger.scratch(("adapter output", elements * sizes.narrow))
    else:
        multiply(ledger, sizes, elements)


def adapter_backward(ledger: Ledger, sizes: LayerSizes, rows: int, adapter: AdapterSizes | None) -> Block | None:
    """Return the gradient of the adapter's narrow values; the gradient of its input is added to the existing one."""
    if adapter is None:
        return None
    grad = parts = ledger.make("adapter", rows * adapter.a[0] * sizes.narrow)
    if adapter.parts > 1:
        grad = ledger.make("adapter", rows * adapter.a[0] * sizes.narrow)
        ledger.free(parts)
    _add_product(ledger, sizes, rows * adapter.a[1], adapter)
    return grad


def adapter_gradients(
    ledger: Ledger, sizes: LayerSizes, rows: int, adapter: AdapterSizes | None, grad: Block | None
) -> None:
    """Compute the gradients of the adapter's weights. Frees `grad`, which `adapter_backward` has returned."""
    if adapter is None:
        return
    add_weight_gradient(ledger, sizes, math.prod(adapter.a))
    narrow = _adapter_input(ledger, sizes, rows, adapter)
    add_weight_gradient(ledger, sizes, adapter.output * adapter.b[1])
    ledger.free(narrow, grad)


def _adapter_input(ledger: Ledger, sizes: LayerSizes, rows: int, adapter: AdapterSizes) -> Block:
    narrow = ledger.make("adapter", rows * adapter.a[0] * sizes.narrow)
    multiply(ledger, sizes, rows * adapter.a[0], adapter.experts)
    return narrow


def add_weight_gradient(ledger: Ledger, sizes: LayerSizes, size: int) -> None:
    """Compute a weight's gradient.

    The matrix product adds to the main gradient itself, except on CPUs if the main gradient is wider."""
    if sizes.mixed and not sizes.on_cuda:
        add_gradient(ledger, sizes, size)


def hidden_bytes(sizes: LayerSizes, tokens: int) -> int:
    """Return the bytes of the hidden states of `tokens` tokens, gathered over tp."""
    return tokens * sizes.hidden * sizes.narrow


def row_forward(ledger: Ledger, sizes: LayerSizes, adapter: AdapterSizes | None) -> Block:
    """Return the output of a row-parallel matrix; its input belongs to the caller."""
    partial = ledger.make("row output", hidden_bytes(sizes, sizes.tokens))
    multiply(ledger, sizes, sizes.tokens * sizes.hidden)
    adapter_forward(ledger, sizes, sizes.tokens, adapter)
    out = scattered(ledger, sizes.tp, "row output", partial)
    if sizes.linear_bias:
        biased = ledger.make("row output", out.num_bytes)
        ledger.free(out)
        out = biased
    return out

"""A mixture of experts on a tile of tokens (memo.executor.expert_pieces, memo.parallel.experts), in requests.

The number of rows of an expert depends on the data. It changes only the scratch memory of products on CPUs, where the
largest expert counts: it is assumed to have twice its share of the rows. Numbers of experts and places of rows are
int64.
"""

import math

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import AdapterSizes, add_weight_gradient, hidden_bytes, multiply
from memo.estimate.program.messages import reduce_scatter, scattered
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.tokenwise import activation_forward

_INT64 = 8


def route(ledger: Ledger, sizes: LayerSizes, tokens: int) -> None:
    """Compute the router's scores and choice; the routing is copied to existing memory."""
    scores = ledger.make("scores", tokens * sizes.experts * sizes.wide)
    _wide_inputs(ledger, sizes, tokens)
    ledger.scratch(
        ("choice", tokens * sizes.top_k * _INT64),
        *(("routing", tokens * n * sizes.top_k * sizes.wide) for n in (1, 1, 2)),
    )
    ledger.free(scores)


def _wide_inputs(ledger: Ledger, sizes: LayerSizes, tokens: int) -> None:
    """Cast the inputs of the router's products, which are in the wide dtype."""
    if sizes.mixed:
        ledger.scratch(
            ("wide tokens", tokens * sizes.hidden * sizes.wide),
            ("wide router", sizes.experts * sizes.hidden * sizes.wide),
        )


def expert_rows(ledger: Ledger, sizes: LayerSizes, tokens: int) -> Block:
    """Return the order of the rows, with each row's place."""
    num_bytes = tokens * sizes.top_k * _INT64
    ledger.scratch(*(("order of rows", num_bytes),) * 5)
    return ledger.make("order of rows", 2 * num_bytes)


def of_tokens(ledger: Ledger, sizes: LayerSizes, tokens: int) -> Block:
    """Return a row of hidden states for each expert of each token."""
    index = ledger.make("order of rows", tokens * sizes.top_k * _INT64)
    rows = ledger.make("expert rows", hidden_bytes(sizes, tokens) * sizes.top_k)
    ledger.free(index)
    return rows


def sums(ledger: Ledger, sizes: LayerSizes, tokens: int, rows: Block) -> Block:
    """Return the sums of each token's rows. Frees the rows."""
    found = ledger.make("sums of rows", hidden_bytes(sizes, tokens))
    ledger.scratch(("order of rows", 2 * tokens * _INT64))
    ledger.free(rows)
    return found


def _products(ledger: Ledger, sizes: LayerSizes, elements: int) -> None:
    """Request the scratch memory of products with `elements` elements in all results."""
    multiply(ledger, sizes, min(elements, 2 * elements // sizes.experts))


def _add_gradients(ledger: Ledger, sizes: LayerSizes, matrix: int) -> None:
    add_weight_gradient(ledger, sizes, matrix // sizes.experts)


def _adapter_forward(ledger: Ledger, sizes: LayerSizes, tokens: int, adapter: AdapterSizes | None) -> None:
    """Compute the adapter's output, which is added to the output of each row (memo.parallel.adapter)."""
    if adapter is not None:
        rows = tokens * sizes.top_k
        narrow = ledger.make("adapter", rows * adapter.a[0] * sizes.narrow)
        ledger.scratch(("adapter output", rows * adapter.b[0] // adapter.parts * sizes.narrow))
        ledger.free(narrow)


def _adapter_backward(ledger: Ledger, sizes: LayerSizes, tokens: int, adapter: AdapterSizes | None) -> Block | None:
    """Return the gradient of the adapter's narrow values; the gradient of its input is added to the existing one."""
    if adapter is None:
        return None
    rows = tokens * sizes.top_k
    grad = parts = ledger.make("adapter", rows * adapter.a[0] * sizes.narrow)
    if adapter.parts > 1:
        grad = ledger.make("adapter", rows * adapter.a[0] * sizes.narrow)
        ledger.free(parts)
    ledger.scratch(("adapter output", rows * adapter.a[1] * sizes.narrow))
    return grad


def _adapter_gradients(
    ledger: Ledger, sizes: LayerSizes, tokens: int, adapter: AdapterSizes | None, grad: Block | None
) -> None:
    """Compute the gradients of the adapter's weights. Frees `grad`, which `_adapter_backward` has returned."""
    if adapter is not None:
        add_weight_gradient(ledger, sizes, math.prod(adapter.a))
        narrow = ledger.make("adapter", tokens * sizes.top_k * adapter.a[0] * sizes.narrow)
        add_weight_gradient(ledger, sizes, math.prod(adapter.b) // adapter.parts)
        ledger.free(narrow, grad)


def first_forward(
    ledger: Ledger, sizes: LayerSizes, tokens: int, is_placed: bool, adapter: AdapterSizes | None
) -> Block | None:
    """Return the output of fc1; None if it is written to existing memory (`is_placed`)."""
    rows, elements = of_tokens(ledger, sizes, tokens), tokens * sizes.fc1
    out = None if is_placed else ledger.make("fc1", elements * sizes.narrow)
    if is_placed and sizes.on_cuda:
        ledger.scratch(("fc1", elements * sizes.narrow))
    _products(ledger, sizes, elements)
    _adapter_forward(ledger, sizes, tokens, adapter)
    ledger.free(rows)
    return out


def first_backward(ledger: Ledger, sizes: LayerSizes, tokens: int, matrix: int, adapter: AdapterSizes | None) -> Block:
    """Return the gradient of the sharded input; `matrix`: elements of fc1."""
    of_router = ledger.make("wide router", sizes.experts * sizes.hidden * sizes.wide)
    of_tokens_wide = ledger.make("wide tokens", tokens * sizes.hidden * sizes.wide)
    ledger.scratch(*(("scores", tokens * sizes.experts * sizes.wide),) * 3)
    _wide_inputs(ledger, sizes, tokens)
    rows = ledger.make("expert rows", hidden_bytes(sizes, tokens) * sizes.top_k)
    _products(ledger, sizes, tokens * sizes.top_k * sizes.hidden)
    narrow = _adapter_backward(ledger, sizes, tokens, adapter)
    whole = sums(ledger, sizes, tokens, rows)
    if sizes.mixed and not sizes.on_cuda:
        ledger.scratch(("wide part", tokens * sizes.hidden * sizes.wide))
    ledger.free(of_tokens_wide)
    grad_x, copy = reduce_scatter(ledger, sizes.tp, "column gradient", whole)
    rows = of_tokens(ledger, sizes, tokens)
    _add_gradients(ledger, sizes, matrix)
    _adapter_gradients(ledger, sizes, tokens, adapter, narrow)
    ledger.free(rows, of_router, None if grad_x is whole else whole)
    ledger.free_late(copy)
    return grad_x


def activate(ledger: Ledger, sizes: LayerSizes, tokens: int) -> Block:
    plain, _ = activation_forward(ledger, sizes, tokens, graph=False)
    weighted = ledger.make("activation", plain.num_bytes)
    ledger.free(plain)
    return weighted


def activate_again(ledger: Ledger, sizes: LayerSizes, tokens: int) -> tuple[Block, tuple[Block, ...]]:
    """Return (activation, tensors that the graph keeps beside it)."""
    plain, kept = activation_forward(ledger, sizes, tokens, graph=True)
    return ledger.make("activation", plain.num_bytes), (plain, *kept)


def second_forward(ledger: Ledger, sizes: LayerSizes, tokens: int, adapter: AdapterSizes | None) -> Block:
    """Return the output of the layer's experts; their activation belongs to the caller."""
    rows = ledger.make("expert rows", hidden_bytes(sizes, tokens) * sizes.top_k)
    _products(ledger, sizes, tokens * sizes.top_k * sizes.hidden)
    _adapter_forward(ledger, sizes, tokens, adapter)
    return scattered(ledger, sizes.tp, "row output", sums(ledger, sizes, tokens, rows))


def second_backward(ledger: Ledger, sizes: LayerSizes, tokens: int, matrix: int, adapter: AdapterSizes | None) -> Block:
    """Return the gradient of the activation; `matrix`: elements of fc2."""
    rows, elements = of_tokens(ledger, sizes, tokens), tokens * sizes.ffn
    _add_gradients(ledger, sizes, matrix)
    grad = ledger.make("row gradient", elements * sizes.narrow)
    _products(ledger, sizes, elements)
    narrow = _adapter_backward(ledger, sizes, tokens, adapter)
    _adapter_gradients(ledger, sizes, tokens, adapter, narrow)
    ledger.free(rows)
    return grad

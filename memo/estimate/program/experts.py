"""A mixture of experts on a tile of tokens (memo.executor.expert_pieces, memo.parallel.experts), in requests.

The number of rows of an expert depends on the data. It changes only the scratch memory of products on CPUs, for which
`multiply` assumes a largest number. Numbers of experts and places of rows are int64.
"""

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.matrices import (
    AdapterSizes,
    adapter_backward,
    adapter_forward,
    adapter_gradients,
    add_weight_gradient,
    hidden_bytes,
    multiply,
)
from memo.estimate.program.messages import reduce_scatter, scattered
from memo.estimate.program.sizes import LayerSizes

_INT64 = 8


def route(ledger: Ledger, sizes: LayerSizes) -> None:
    """Compute the router's scores and choice; the routing is copied to existing memory."""
    scores = ledger.make("scores", sizes.tokens * sizes.experts * sizes.wide)
    _wide_inputs(ledger, sizes)
    ledger.scratch(
        ("choice", sizes.tokens * sizes.top_k * _INT64),
        *(("routing", sizes.tokens * n * sizes.top_k * sizes.wide) for n in (1, 1, 2)),
    )
    ledger.free(scores)


def _wide_inputs(ledger: Ledger, sizes: LayerSizes) -> None:
    """Cast the inputs of the router's products, which are in the wide dtype."""
    if sizes.mixed:
        ledger.scratch(
            ("wide tokens", sizes.tokens * sizes.hidden * sizes.wide),
            ("wide router", sizes.experts * sizes.hidden * sizes.wide),
        )


def expert_rows(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return the order of the rows, with each row's place."""
    num_bytes = sizes.tokens * sizes.top_k * _INT64
    ledger.scratch(*(("order of rows", num_bytes),) * 5)
    return ledger.make("order of rows", 2 * num_bytes)


def of_tokens(ledger: Ledger, sizes: LayerSizes) -> Block:
    """Return a row of hidden states for each expert of each token."""
    index = ledger.make("order of rows", sizes.tokens * sizes.top_k * _INT64)
    rows = ledger.make("expert rows", hidden_bytes(sizes, sizes.tokens) * sizes.top_k)
    ledger.free(index)
    return rows


def sums(ledger: Ledger, sizes: LayerSizes, rows: Block) -> Block:
    """Return the sums of each token's rows. Frees the rows."""
    found = ledger.make("sums of rows", hidden_bytes(sizes, sizes.tokens))
    ledger.scratch(("order of rows", 2 * sizes.tokens * _INT64))
    ledger.free(rows)
    return found


def first_forward(ledger: Ledger, sizes: LayerSizes, is_placed: bool, adapter: AdapterSizes | None) -> Block | None:
    """Return the output of fc1; None if it is written to existing memory (`is_placed`)."""
    rows, elements = of_tokens(ledger, sizes), sizes.tokens * sizes.fc1
    out = None if is_placed else ledger.make("fc1", elements * sizes.narrow)
    if is_placed and sizes.on_cuda:
        ledger.scratch(("fc1", elements * sizes.narrow))
    multiply(ledger, sizes, elements, sizes.experts)
    adapter_forward(ledger, sizes, sizes.tokens * sizes.top_k, adapter)
    ledger.free(rows)
    return out


def first_backward(
    ledger: Ledger, sizes: LayerSizes, matrix: int, adapter: AdapterSizes | None, inputs: int
) -> tuple[Block, ...]:
    """Return the gradient of the sharded input, or of both `inputs` if the router has one of its own; `matrix`:
    elements of an expert's fc1 that are trained."""
    of_router = ledger.make("wide router", sizes.experts * sizes.hidden * sizes.wide)
    of_tokens_wide = ledger.make("wide tokens", sizes.tokens * sizes.hidden * sizes.wide)
    ledger.scratch(*(("scores", sizes.tokens * sizes.experts * sizes.wide),) * 3)
    _wide_inputs(ledger, sizes)
    rows = ledger.make("expert rows", hidden_bytes(sizes, sizes.tokens) * sizes.top_k)
    multiply(ledger, sizes, sizes.tokens * sizes.top_k * sizes.hidden, sizes.experts)
    narrow = adapter_backward(ledger, sizes, sizes.tokens * sizes.top_k, adapter)
    wholes = [sums(ledger, sizes, rows)]
    if inputs > 1:
        wholes.append(ledger.make("column gradient", hidden_bytes(sizes, sizes.tokens)))
    elif sizes.mixed and not sizes.on_cuda:
        ledger.scratch(("wide part", sizes.tokens * sizes.hidden * sizes.wide))
    ledger.free(of_tokens_wide)
    messages = [reduce_scatter(ledger, sizes.tp, "column gradient", whole) for whole in wholes]
    rows = of_tokens(ledger, sizes)
    add_weight_gradient(ledger, sizes, matrix)
    adapter_gradients(ledger, sizes, sizes.tokens * sizes.top_k, adapter, narrow)
    ledger.free(rows, of_router, *(wholes if sizes.tp > 1 else ()))
    ledger.free_late(*(copy for _, copy in messages))
    return tuple(grad_x for grad_x, _ in messages)


def second_forward(ledger: Ledger, sizes: LayerSizes, adapter: AdapterSizes | None) -> Block:
    """Return the output of the layer's experts; their activation belongs to the caller."""
    rows = ledger.make("expert rows", hidden_bytes(sizes, sizes.tokens) * sizes.top_k)
    multiply(ledger, sizes, sizes.tokens * sizes.top_k * sizes.hidden, sizes.experts)
    adapter_forward(ledger, sizes, sizes.tokens * sizes.top_k, adapter)
    return scattered(ledger, sizes.tp, "row output", sums(ledger, sizes, rows))

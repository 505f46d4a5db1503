"""The backward of a mixture of experts on one tile of tokens (see memo.executor.pieces).

Shapes as in memo.parallel.experts, for a tile of [s, b] tokens, gathered over tp: t = s b; f: width of an expert on
this tp rank (2 f when gated, before the activation). Every tp rank routes all tokens in the same way. A rank's gradient
of the routing covers only its part of the width, and so do all gradients that follow from it; they are summed over tp
together with the gradients of hidden states and of whole weights.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.executor.pieces import Gathering, GradientSink, add_gradients, product_backward
from memo.parallel.collectives import group_rank, group_size, reduce_scatter_async
from memo.parallel.experts import ExpertMatrix, ExpertRows, of_shares, shares
from memo.parallel.weight_gradients import add_weight_gradient


class ExpertMlp(Protocol):
    """What a backward reads of memo.model.layer.Experts."""

    router: ExpertMatrix
    fc1: ExpertMatrix
    fc2: ExpertMatrix

    def route_backward(
        self, grad: Tensor, x: Tensor, routing: Tensor, rows: ExpertRows
    ) -> tuple[Tensor, tuple[Tensor, ...]]: ...


def experts_backward(
    grads: tuple[Tensor, Tensor],
    gatherings: Sequence[Gathering],
    routing: Tensor,
    mlp: ExpertMlp,
    rows: ExpertRows,
    group: ProcessGroup | None,
    sink: GradientSink,
) -> tuple[Tensor, ...]:
    """Gradient [n, b, h] of the sharded input of fc1 and router, or of each where the router has an input of its own.

    Args:
        grads: gradients of fc1's output [s, b, K f] and of the routing [s, b, 2 K].
        gatherings: of each input.
    """
    x, *own = (gathering.wait() for gathering in gatherings)
    grad = grads[0].view(rows.count, -1)
    grad_x, of_router = mlp.route_backward(grads[1], own[0] if own else x, routing, rows)
    grad_rows, adapter = rows.products(grad, mlp.fc1.weight, back=True), mlp.fc1.adapter
    narrow = None if adapter is None else adapter.add_gradient_(grad_rows, grad, rows)
    whole = rows.sums(grad_rows)
    del grad_rows
    # The sum is in the wide dtype: the other way round CPUs copy both to it.
    wholes = [whole, grad_x.to(whole.dtype)] if own else [whole.copy_(grad_x.add_(whole))]
    del grad_x
    messages = [reduce_scatter_async(each.view_as(x), group) for each in wholes]
    for parameter, found in zip((mlp.router.weight, mlp.router.bias, mlp.router.scale), of_router, strict=False):
        main = None if parameter is None else sink.main_gradient(parameter)
        if main is not None:
            main.add_(found)
    add_gradients(grad, rows.of_tokens(x), narrow, mlp.fc1, sink, rows)
    if mlp.fc1.bias is not None:
        rows.add_bias_gradients(sink.main_gradient(mlp.fc1.bias), grad)
    for _, work in messages:
        if work is not None:
            work.wait()
    return tuple(scattered for scattered, _ in messages)


def combine_backward(
    gathering: Gathering, x: Tensor | None, routing: Tensor, mlp: ExpertMlp, rows: ExpertRows, sink: GradientSink
) -> Tensor:
    """Gradient of x [s, b, K f]; `gathering` gathers the output's gradient. x is None if the matrices are frozen."""
    grad = rows.of_tokens(gathering.wait())
    grad_x = product_backward(grad, None if x is None else x.view(rows.count, -1), mlp.fc2, sink, rows)
    return grad_x.view(*routing.shape[:-1], -1)


def biases_backward(
    grad: Tensor, routing: Tensor, mlp: ExpertMlp, rows: ExpertRows, group: ProcessGroup | None, sink: GradientSink
) -> Tensor:
    """Gradient of the output [n, b, h] -> of the routing [s, b, 2 K] through the biases of fc2; zero for tokens of
    other ranks. Adds the biases' own gradient to the sink."""
    assert mlp.fc2.bias is not None
    rank, size, flat = group_rank(group), group_size(group), grad.flatten(0, 1)
    own = routing.chunk(size)[rank]
    biases, main = mlp.fc2.bias.view(rows.num_experts, -1), sink.main_gradient(mlp.fc2.bias)
    if main is not None:
        add_weight_gradient(main.view(rows.num_experts, -1), shares(own, rows.num_experts, flat.dtype), flat)
    found = torch.zeros_like(routing)
    own_grads = of_shares(flat @ biases.t(), own)
    found.chunk(size)[rank][..., : rows.top_k] = own_grads.view(*own.shape[:-1], -1)
    return found

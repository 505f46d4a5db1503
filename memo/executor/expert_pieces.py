"""A mixture of experts on one tile of tokens, with explicit forward and backward, as memo.executor.pieces has matrices.

Shapes as in memo.parallel.experts, of a tile of [s, b] tokens, gathered over tp: t = s b; f: width of an expert on this
rank of tp (2 f when gated, before the activation). Every rank of tp routes all tokens, alike. The gradients of the
weights that it finds are those of its part of the width, and so are all that follow from them; they are summed over tp
with the gradients of hidden states and of whole weights.
"""

from typing import Protocol

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.executor.pieces import Gathering, GradientSink
from memo.parallel.collectives import reduce_scatter, reduce_scatter_async
from memo.parallel.experts import ExpertRows


class Matrix(Protocol):
    weight: nn.Parameter


class ExpertMlp(Protocol):
    """memo.model.layer.Experts."""

    router: Matrix
    fc1: Matrix
    fc2: Matrix

    def rows(self, routing: Tensor) -> ExpertRows: ...
    def route(self, x: Tensor) -> Tensor: ...
    def route_backward(self, grad: Tensor, x: Tensor, routing: Tensor) -> tuple[Tensor, Tensor]: ...


def experts_forward(x: Tensor, mlp: ExpertMlp, rows: ExpertRows, out: Tensor | None) -> Tensor:
    """x [s, b, h] -> fc1 of each expert of a token, [s, b, K f], in `out` if given; rows stand sorted by expert."""
    made = rows.products(rows.of_tokens(x), mlp.fc1.weight, out=None if out is None else out.view(rows.count, -1))
    return made.view(*x.shape[:2], -1)


def experts_backward(
    grads: tuple[Tensor, Tensor],
    gathering: Gathering,
    routing: Tensor,
    mlp: ExpertMlp,
    rows: ExpertRows,
    group: ProcessGroup | None,
    sink: GradientSink,
) -> Tensor:
    """Gradient [n, b, h] of the sharded input of router and fc1; `gathering` gathers that input.

    Args:
        grads: of fc1 [s, b, K f], and of the routing [s, b, 2 K].
    """
    x, grad = gathering.wait(), grads[0].view(rows.count, -1)
    grad_x, of_router = mlp.route_backward(grads[1], x, routing)
    grad_x = rows.sums(rows.products(grad, mlp.fc1.weight, back=True)).add_(grad_x)
    scattered, work = reduce_scatter_async(grad_x.view_as(x), group)
    sink.main_gradient(mlp.router.weight).add_(of_router)
    rows.add_weight_gradients(sink.main_gradient(mlp.fc1.weight), grad, rows.of_tokens(x))
    if work is not None:
        work.wait()
    return scattered


def combine_forward(x: Tensor, routing: Tensor, mlp: ExpertMlp, rows: ExpertRows, group: ProcessGroup | None) -> Tensor:
    """Sums over each token's rows of fc2 of x [s, b, K f], and over tp -> [n, b, h]."""
    y = rows.sums(rows.products(x.view(rows.count, -1), mlp.fc2.weight))
    return reduce_scatter(y.view(*routing.shape[:2], -1), group)


def combine_backward(gathering: Gathering, x: Tensor, mlp: ExpertMlp, rows: ExpertRows, sink: GradientSink) -> Tensor:
    """Gradient of x [s, b, K f]; `gathering` gathers that of the output."""
    grad = rows.of_tokens(gathering.wait())
    rows.add_weight_gradients(sink.main_gradient(mlp.fc2.weight), grad, x.view(rows.count, -1))
    return rows.products(grad, mlp.fc2.weight, back=True).view_as(x)

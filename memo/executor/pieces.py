"""The operations of a layer on one tile of tokens, with explicit forward and backward.

For matrices, the gathering of their inputs and the addition of weight gradients to main gradients are explicit, on
fixed tiles, so that any share of swapping gives the same bits. The operations between them (norms, RoPE, activations)
are cheap and token-wise; for these memo.parallel.replayed runs the model's own code again under a local graph.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_gather_async, reduce_scatter, reduce_scatter_async
from memo.parallel.weight_gradients import add_weight_gradient


class GradientSink(Protocol):
    """Receives the gradients of parameters (memo.parallel.data)."""

    def main_gradient(self, parameter: nn.Parameter) -> Tensor: ...
    def gradient_done(self, parameter: nn.Parameter) -> None: ...


class Linear(Protocol):
    """The interface of a column- or row-parallel matrix that is used here."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class Gathering:
    """An all-gather of x [n, ...] over tp to [s, ...] that runs while the device computes something else."""

    def __init__(self, x: Tensor, group: ProcessGroup | None) -> None:
        self._whole, self._work = all_gather_async(x, group)

    def wait(self) -> Tensor:
        """Make the compute stream wait for the gather, and return the gathered tensor."""
        if self._work is not None:
            self._work.wait()
            self._work = None  # it keeps x alive
        return self._whole


def column_forward(gathered: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    """x [s, b, in] W^T + bias -> [s, b, out/tp], in `out` if given; with and without it the same call and bits."""
    if out is None:
        out = gathered.new_empty((*gathered.shape[:-1], linear.weight.shape[0]))
    flat_out, flat_x = out.flatten(0, 1), gathered.flatten(0, 1)
    if linear.bias is None:
        torch.mm(flat_x, linear.weight.t(), out=flat_out)
    else:
        torch.addmm(linear.bias, flat_x, linear.weight.t(), out=flat_out)
    return out


def column_backward(
    grad_out: Tensor, gathering: Gathering, linear: Linear, group: ProcessGroup | None, sink: GradientSink
) -> Tensor:
    """Gradient [n, b, in] of the sharded input of a column-parallel matrix; `gathering` gathers that input."""
    grad_x, work = reduce_scatter_async(grad_out @ linear.weight, group)
    add_weight_gradient(sink.main_gradient(linear.weight), grad_out, gathering.wait())
    if linear.bias is not None:
        sink.main_gradient(linear.bias).add_(grad_out.flatten(0, 1).sum(0))
    if work is not None:
        work.wait()
    return grad_x


def row_forward(x: Tensor, linear: Linear, group: ProcessGroup | None) -> Tensor:
    """reduce_scatter(x [s, b, in/tp] W^T) + bias -> [n, b, out]."""
    y = reduce_scatter(torch.nn.functional.linear(x, linear.weight), group)
    return y if linear.bias is None else y + linear.bias


def row_backward(grad: Tensor, gathering: Gathering, x: Tensor, linear: Linear, sink: GradientSink) -> Tensor:
    """Gradient [s, b, in/tp] of the input of a row-parallel matrix; `gathering` gathers grad [n, b, out]."""
    if linear.bias is not None:
        sink.main_gradient(linear.bias).add_(grad.flatten(0, 1).sum(0))
    gathered = gathering.wait()
    add_weight_gradient(sink.main_gradient(linear.weight), gathered, x)
    return gathered @ linear.weight

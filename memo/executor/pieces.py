"""The operations of a layer on one tile of tokens, with explicit forward and backward.

Matrices gather their inputs and add weight gradients to main gradients explicitly, on fixed tiles, so that the results
do not depend on how much is swapped. The operations between matrices (norms, RoPE, activations) are cheap and
token-wise: memo.parallel.replayed runs the model's own code again under a local graph.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.adapter import ONE_MATRIX, Adapter, Products
from memo.parallel.collectives import all_gather_async, reduce_scatter, reduce_scatter_async


class GradientSink(Protocol):
    """Receives the gradients of parameters (memo.parallel.data)."""

    def main_gradient(self, parameter: nn.Parameter) -> Tensor | None: ...
    def gradient_done(self, parameter: nn.Parameter) -> None: ...


class Linear(Protocol):
    """The interface of a column- or row-parallel matrix that is used here."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    adapter: Adapter | None


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
    """x [s, b, in] W^T + bias -> [s, b, out/tp], in `out` if given, which changes neither the torch call nor bits."""
    if out is None:
        out = gathered.new_empty((*gathered.shape[:-1], linear.weight.shape[0]))
    flat_out, flat_x = out.flatten(0, 1), gathered.flatten(0, 1)
    if linear.bias is None:
        torch.mm(flat_x, linear.weight.t(), out=flat_out)
    else:
        torch.addmm(linear.bias, flat_x, linear.weight.t(), out=flat_out)
    if linear.adapter is not None:
        linear.adapter.add_(flat_out, flat_x)
    return out


def column_backward(
    grad_out: Tensor, gathering: Gathering | None, linear: Linear, group: ProcessGroup | None, sink: GradientSink
) -> Tensor:
    """Gradient [n, b, in] of the sharded input of a column-parallel matrix; `gathering` gathers that input, and is None
    if the matrix has no trained parameter."""
    whole, flat = grad_out @ linear.weight, grad_out.flatten(0, 1)
    narrow = None if linear.adapter is None else linear.adapter.add_gradient_(whole.flatten(0, 1), flat)
    grad_x, work = reduce_scatter_async(whole, group)
    if gathering is not None:
        add_gradients(flat, gathering.wait().flatten(0, 1), narrow, linear, sink)
    _add_bias_gradient(linear, flat, sink)
    if work is not None:
        work.wait()
    return grad_x


def row_forward(x: Tensor, linear: Linear, group: ProcessGroup | None) -> Tensor:
    """reduce_scatter(x [s, b, in/tp] W^T) + bias -> [n, b, out]."""
    partial = torch.nn.functional.linear(x, linear.weight)
    if linear.adapter is not None:
        linear.adapter.add_(partial.flatten(0, 1), x.flatten(0, 1))
    y = reduce_scatter(partial, group)
    return y if linear.bias is None else y + linear.bias


def row_backward(grad: Tensor, gathering: Gathering, x: Tensor | None, linear: Linear, sink: GradientSink) -> Tensor:
    """Gradient [s, b, in/tp] of the input x of a row-parallel matrix; `gathering` gathers grad [n, b, out]. x is None
    if the matrix has no trained parameter."""
    _add_bias_gradient(linear, grad.flatten(0, 1), sink)
    gathered = gathering.wait()
    grad_x = product_backward(gathered.flatten(0, 1), None if x is None else x.flatten(0, 1), linear, sink)
    return grad_x.view(*gathered.shape[:2], -1)


def product_backward(
    grad: Tensor, x: Tensor | None, linear: Linear, sink: GradientSink, by: Products = ONE_MATRIX
) -> Tensor:
    """Gradient of a product's output [t, out] -> of its input x [t, in], which is None as in `row_backward`."""
    if x is not None:
        by.add_weight_gradients(sink.main_gradient(linear.weight), grad, x)
    grad_x = by.products(grad, linear.weight, back=True)
    if linear.adapter is not None and x is not None:
        narrow = linear.adapter.add_gradient_(grad_x, grad, by)
        linear.adapter.add_weight_gradients(grad, x, narrow, sink.main_gradient, by)
    return grad_x


def add_gradients(
    grad: Tensor, x: Tensor, narrow: Tensor | None, linear: Linear, sink: GradientSink, by: Products = ONE_MATRIX
) -> None:
    """Add the gradients of a matrix and its adapter, from the output's [t, out], x [t, in] and, of an adapter, what its
    `add_gradient_` has returned."""
    by.add_weight_gradients(sink.main_gradient(linear.weight), grad, x)
    if linear.adapter is not None and narrow is not None:
        linear.adapter.add_weight_gradients(grad, x, narrow, sink.main_gradient, by)


def _add_bias_gradient(linear: Linear, grad: Tensor, sink: GradientSink) -> None:
    main = None if linear.bias is None else sink.main_gradient(linear.bias)
    if main is not None:
        main.add_(grad.sum(0))

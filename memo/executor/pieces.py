"""Small explicit pieces of a layer on one tile of tokens, and how each is replayed in backward.

The matrices are explicit: their inputs are gathered, their weight gradients added to main gradients, at
fixed tiles, so that any fraction of swapping gives the same bits. What lies between them (norms, RoPE,
activations) is cheap and token-wise; `replay` runs the model's own code for it again under a local graph.
"""

from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_gather_async, reduce_scatter, reduce_scatter_async


class GradientSink(Protocol):
    """Where gradients of parameters go (memo.parallel.data)."""

    def main_gradient(self, parameter: nn.Parameter) -> Tensor: ...
    def gradient_done(self, parameter: nn.Parameter) -> None: ...


class Linear(Protocol):
    """What the pieces need of a column- or row-parallel matrix."""

    weight: nn.Parameter
    bias: nn.Parameter | None


class Gathering:
    """x [n, ...] of all tp ranks on its way to [s, ...], while the device computes something else."""

    def __init__(self, x: Tensor, group: ProcessGroup | None) -> None:
        self._whole, self._work = all_gather_async(x, group)

    def wait(self) -> Tensor:
        """What is computed from here on finds all of it."""
        if self._work is not None:
            self._work.wait()
            self._work = None  # it holds x
        return self._whole


class Replayed:
    """Outputs of a token-wise piece and the way back through it."""

    def __init__(
        self, function: Callable[[Tensor], Tensor | tuple[Tensor, ...]], x: Tensor, parameters: Iterable[nn.Parameter]
    ) -> None:
        self.parameters = list(parameters)
        with torch.enable_grad():
            self._x = x.detach().requires_grad_()
            outputs = function(self._x)
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    @property
    def output(self) -> Tensor:
        return self._outputs[0].detach()

    def backward(self, sink: GradientSink, *grads: Tensor) -> Tensor:
        """Gradient of the input; those of the parameters are added to the sink's. Frees the graph."""
        grad_x, *parameter_grads = torch.autograd.grad(self._outputs, [self._x, *self.parameters], grads)
        for parameter, value in zip(self.parameters, parameter_grads, strict=True):
            sink.main_gradient(parameter).add_(value)
        return grad_x


def column_forward(gathered: Tensor, linear: Linear, out: Tensor | None = None) -> Tensor:
    """x [s, b, in] W^T + bias -> [s, b, out/tp], written to `out` if given: the same call and bits without."""
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
    """Gradient [n, b, in] of the sharded input of a column-parallel matrix, which is being gathered."""
    grad_x, work = reduce_scatter_async(grad_out @ linear.weight, group)
    _add_weight_gradient(sink, linear, grad_out, gathering.wait())
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
    """Gradient [s, b, in/tp] of the input of a row-parallel matrix; grad is [n, b, out], and is being gathered."""
    if linear.bias is not None:
        sink.main_gradient(linear.bias).add_(grad.flatten(0, 1).sum(0))
    gathered = gathering.wait()
    _add_weight_gradient(sink, linear, gathered, x)
    return gathered @ linear.weight


def _add_weight_gradient(sink: GradientSink, linear: Linear, grad_out: Tensor, x: Tensor) -> None:
    main = sink.main_gradient(linear.weight)
    left, right = grad_out.flatten(0, -2).t(), x.flatten(0, -2)
    if main.dtype == grad_out.dtype:
        main.addmm_(left, right)
    else:
        main.add_(left @ right)

"""A token-wise operation that runs again in backward, under a graph of its own, so that forward saves nothing."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn


class Replayed:
    """The outputs of a token-wise operation, and its backward."""

    def __init__(
        self, function: Callable[..., Tensor | tuple[Tensor, ...]], *x: Tensor, parameters: Iterable[nn.Parameter] = ()
    ) -> None:
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        with torch.enable_grad():
            self._x = [each.detach().requires_grad_() for each in x]
            outputs = function(*self._x)
        self._outputs = outputs if isinstance(outputs, tuple) else (outputs,)

    @property
    def output(self) -> Tensor:
        return self._outputs[0].detach()

    def backward(self, sum_of: Callable[[nn.Parameter], Tensor | None], *grads: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of the inputs, given those of the outputs. Frees the graph.

        The gradient of each parameter is added to `sum_of(parameter)`, which may be in a wider dtype.
        """
        found = torch.autograd.grad(self._outputs, [*self._x, *self.parameters], grads)
        for parameter, value in zip(self.parameters, found[len(self._x) :], strict=True):
            total = sum_of(parameter)
            assert total is not None, "a frozen parameter has no gradient"
            total.add_(value)
        return found[: len(self._x)]

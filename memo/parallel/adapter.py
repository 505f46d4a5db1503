"""LoRA's two matrices A and B beside a matrix that tensor parallelism splits (defined in memo.spec.lora).

Their products use the input and the gradient that are gathered over tp for the split matrix, and their results are
scattered with its result. So an adapter adds no message over tp. One of A and B is whole on every tp rank; its gradient
is summed over tp like the gradient of a norm.

Shapes: t tokens, gathered over tp, or rows of tokens for experts; r rank, P parts of a fused matrix that have adapters;
E experts, whose matrices are one below the other, or 1.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor, nn

from memo.parallel.weight_gradients import add_weight_gradient


class Products(Protocol):
    """Multiplies rows with matrices: all rows with one matrix, or each row with its expert's matrix
    (memo.parallel.experts.ExpertRows)."""

    def products(self, rows: Tensor, matrices: Tensor, *, back: bool = False) -> Tensor: ...
    def add_products_(self, y: Tensor, rows: Tensor, matrices: Tensor, *, back: bool = False) -> None: ...
    def add_weight_gradients(self, main: Tensor | None, grad_out: Tensor, rows: Tensor) -> None: ...


class _WithOneMatrix:
    def products(self, rows: Tensor, matrices: Tensor, *, back: bool = False) -> Tensor:
        return rows @ (matrices if back else matrices.t())

    def add_products_(self, y: Tensor, rows: Tensor, matrices: Tensor, *, back: bool = False) -> None:
        y.addmm_(rows, matrices if back else matrices.t())

    def add_weight_gradients(self, main: Tensor | None, grad_out: Tensor, rows: Tensor) -> None:
        add_weight_gradient(main, grad_out, rows)


ONE_MATRIX = _WithOneMatrix()


class Adapter(nn.Module):
    """The matrices `a` [E P r, in] and `b` [E out, r] on this rank; out: outputs of the parts with adapters."""

    def __init__(
        self, a: nn.Parameter, b: nn.Parameter, factor: float, rows: Sequence[slice], num_experts: int = 0
    ) -> None:
        """`factor`: c; `rows`: for each part, its range in the outputs of one matrix on this rank."""
        super().__init__()
        self.a, self.b, self.factor, self.rows, self.num_experts = a, b, factor, rows, num_experts
        self.is_on = True
        """Whether forwards add anything (`adapters_off`)."""

    def add_(self, y: Tensor, x: Tensor, by: Products = ONE_MATRIX) -> None:
        """y [t, out] += c (x A^T) B^T, for x [t, in]; does nothing within `adapters_off`."""
        if not self.is_on:
            return
        narrow = self._down(x, by).chunk(len(self.rows), 1)
        for own, part, b in zip(self.rows, narrow, self._parts(self.b), strict=True):
            by.add_products_(y[:, own], part, b)

    def add_gradient_(self, grad_x: Tensor, grad_y: Tensor, by: Products = ONE_MATRIX) -> Tensor:
        """Add the gradient of x to grad_x [t, in]; returns the gradient of x A^T, [t, P r]."""
        parts = [
            by.products(grad_y[:, own], b, back=True) for own, b in zip(self.rows, self._parts(self.b), strict=True)
        ]
        grad = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(self.factor)
        by.add_products_(grad_x, grad, self.a, back=True)
        return grad

    def add_weight_gradients(
        self,
        grad_y: Tensor,
        x: Tensor,
        grad: Tensor,
        main_gradient: Callable[[nn.Parameter], Tensor | None],
        by: Products = ONE_MATRIX,
    ) -> None:
        """Add the gradients of A and B to their main gradients; `grad`: the result of `add_gradient_`."""
        by.add_weight_gradients(main_gradient(self.a), grad, x)
        main = main_gradient(self.b)
        if main is not None:
            narrow = self._down(x, by).chunk(len(self.rows), 1)
            for own, part, grad_part in zip(self.rows, narrow, self._parts(main), strict=True):
                by.add_weight_gradients(grad_part, grad_y[:, own], part)

    def _down(self, x: Tensor, by: Products) -> Tensor:
        return by.products(x, self.a).mul_(self.factor)

    def _parts(self, b: Tensor) -> tuple[Tensor, ...]:
        """Split B, or its gradient, into views of the rows of each part: [out, r], for experts [E, out, r]."""
        sizes = [rows.stop - rows.start for rows in self.rows]
        return b.unflatten(0, (self.num_experts, -1)).split(sizes, 1) if self.num_experts else b.split(sizes)


@contextmanager
def adapters_off(models: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which forwards without gradients leave the adapters out."""
    adapters = [module for model in models for module in model.modules() if isinstance(module, Adapter)]
    for adapter in adapters:
        adapter.is_on = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_on = True

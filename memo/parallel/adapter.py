"""LoRA's two matrices beside one that tensor parallelism splits (memo.spec.lora says what they are).

Their products take the input and the gradient of that matrix as they are gathered over tp for it, and what they add is
scattered with what it makes. So ranks of tp share no message more; the gradient of the matrix that all of them have
whole is summed over them like that of a norm.

Shapes: t tokens, gathered over tp; r rank, P parts of a fused matrix that have adapters.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from memo.parallel.weight_gradients import add_weight_gradient


class Adapter(nn.Module):
    """a [P r, in] and b [out of these parts, r] on this rank."""

    def __init__(self, a: nn.Parameter, b: nn.Parameter, factor: float, rows: Sequence[slice]) -> None:
        """`factor`: c; `rows`: of the outputs of the matrix on this rank, those of each part."""
        super().__init__()
        self.a, self.b, self.factor, self.rows = a, b, factor, rows

    def add_(self, y: Tensor, x: Tensor) -> None:
        """y [t, out] += c (x A^T) B^T, for x [t, in]."""
        for own, narrow, b in zip(self.rows, self._down(x).chunk(len(self.rows), 1), self._parts(self.b), strict=True):
            y[:, own].addmm_(narrow, b.t())

    def add_gradient_(self, grad_x: Tensor, grad_y: Tensor) -> Tensor:
        """Adds the gradient of x to grad_x [t, in], and returns that of x A^T, [t, P r]."""
        parts = [grad_y[:, own] @ b for own, b in zip(self.rows, self._parts(self.b), strict=True)]
        grad = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).mul_(self.factor)
        grad_x.addmm_(grad, self.a)
        return grad

    def add_weight_gradients(
        self, grad_y: Tensor, x: Tensor, grad: Tensor, main_gradient: Callable[[nn.Parameter], Tensor | None]
    ) -> None:
        """`grad`: what `add_gradient_` has returned."""
        add_weight_gradient(main_gradient(self.a), grad, x)
        main = main_gradient(self.b)
        if main is not None:
            narrow = self._down(x).chunk(len(self.rows), 1)
            for own, part, of_part in zip(self.rows, narrow, self._parts(main), strict=True):
                add_weight_gradient(of_part, grad_y[:, own], part)

    def _down(self, x: Tensor) -> Tensor:
        return (x @ self.a.t()).mul_(self.factor)

    def _parts(self, b: Tensor) -> tuple[Tensor, ...]:
        return b.split([rows.stop - rows.start for rows in self.rows])

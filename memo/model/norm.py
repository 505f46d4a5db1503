"""LayerNorm and RMSNorm over the last dim."""

from torch import Tensor, nn

from memo_kernels import Ops, wide_dtype


class Norm(nn.Module):
    """A norm whose weights are equal on all tp ranks. Each rank sees a part of the tokens (or heads), so gradients are
    summed over tp.

    Statistics of bf16 inputs are in fp32. If weights are `from_zero`, the factor is 1 + weight, in fp32, because in
    bf16 the sum would lose the low bits of the weight.
    """

    def __init__(
        self, weight: nn.Parameter, bias: nn.Parameter | None, epsilon: float, ops: Ops, *, from_zero: bool = False
    ) -> None:
        """`bias`: the bias of a LayerNorm; None makes an RMSNorm."""
        super().__init__()
        self.weight, self.bias, self.epsilon, self.ops, self.from_zero = weight, bias, epsilon, ops, from_zero

    @property
    def factor(self) -> Tensor:
        return self.weight.to(wide_dtype(self.weight.dtype)) + 1 if self.from_zero else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.factor, self.bias, self.epsilon)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return x + residual, and its norm."""
        return self.ops.add_norm(x, residual, self.factor, self.bias, self.epsilon)

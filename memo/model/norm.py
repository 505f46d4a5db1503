"""LayerNorm and RMSNorm over the last dim."""

from torch import Tensor, nn

from memo_kernels import Ops


class Norm(nn.Module):
    """Weights are the same on every tp rank, which sees part of the tokens (or heads): gradients are summed.

    Statistics of bf16 inputs are in fp32.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, epsilon: float, ops: Ops) -> None:
        """`bias`: of LayerNorm; RMSNorm has none."""
        super().__init__()
        self.weight, self.bias, self.epsilon, self.ops = weight, bias, epsilon, ops

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.bias, self.epsilon)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm."""
        return self.ops.add_norm(x, residual, self.weight, self.bias, self.epsilon)

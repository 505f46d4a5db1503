"""LayerNorm and RMSNorm over the last dim."""

import torch
from torch import Tensor, nn

from memo.config.model import Normalization
from memo.parallel.shards import Shard, empty_parameter, whole
from memo_kernels import Ops


class Norm(nn.Module):
    """Weights are the same on every tp rank, which sees part of the tokens (or heads): gradients are summed.

    Statistics of bf16 inputs are in fp32.
    """

    def __init__(self, name: str, size: int, kind: Normalization, epsilon: float, dtype: torch.dtype, ops: Ops) -> None:
        super().__init__()
        self.epsilon, self.ops = epsilon, ops
        shard = Shard((whole(f"{name}.weight", (size,)),), init="ones", replicated="tp", decay=False)
        self.weight = empty_parameter((size,), shard, dtype)
        self.bias: nn.Parameter | None = None
        if kind == "LayerNorm":
            shard = Shard((whole(f"{name}.bias", (size,)),), init="zeros", replicated="tp", decay=False)
            self.bias = empty_parameter((size,), shard, dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.ops.norm(x, self.weight, self.bias, self.epsilon)

    def of_sum(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """x + residual, and its norm."""
        return self.ops.add_norm(x, residual, self.weight, self.bias, self.epsilon)

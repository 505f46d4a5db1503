"""LayerNorm and RMSNorm over the last dim."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from memo.config.model import Normalization
from memo.parallel.shards import Shard, empty_parameter, whole


class Norm(nn.Module):
    """Weights are the same on every tp rank, which sees part of the tokens (or heads): gradients are summed.

    F.layer_norm and F.rms_norm compute statistics of bf16 inputs in fp32.
    """

    def __init__(self, name: str, size: int, kind: Normalization, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.size, self.epsilon = size, epsilon
        shard = Shard((whole(f"{name}.weight", (size,)),), init="ones", replicated="tp", decay=False)
        self.weight = empty_parameter((size,), shard, dtype)
        self.bias: nn.Parameter | None = None
        if kind == "LayerNorm":
            shard = Shard((whole(f"{name}.bias", (size,)),), init="zeros", replicated="tp", decay=False)
            self.bias = empty_parameter((size,), shard, dtype)

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return F.rms_norm(x, (self.size,), self.weight, self.epsilon)
        return F.layer_norm(x, (self.size,), self.weight, self.bias, self.epsilon)

"""Sum of squares in plain torch."""

import torch
from torch import Tensor


def squared_norm(x: Tensor) -> Tensor:
    """Of a 1-D tensor, as an fp64 scalar."""
    return torch.linalg.vector_norm(x).double().square()

"""Activations in plain torch."""

import torch.nn.functional as F
from torch import Tensor


def activate(inner: Tensor, kind: str) -> Tensor:
    """`kind` gelu or gelu_tanh: [..., f] -> [..., f]; swiglu: silu of the first half times the second, [..., 2 f] ->
    [..., f]."""
    if kind == "swiglu":
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up
    return F.gelu(inner, approximate="tanh" if kind == "gelu_tanh" else "none")

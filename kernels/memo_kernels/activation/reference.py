"""Activations in plain torch."""

import torch.nn.functional as F
from torch import Tensor

SLOPE, LIMIT = 1.702, 7.0
"""Of swiglu_clamped (swiglu_alpha and swiglu_limit of gpt-oss)."""


def activate(inner: Tensor, kind: str) -> Tensor:
    """`kind` gelu or gelu_tanh: [..., f] -> [..., f]; swiglu: silu of the first half times the second, [..., 2 f] ->
    [..., f]; geglu_tanh: so with gelu_tanh; swiglu_clamped as gpt-oss has it, gate sigmoid(1.702 gate) (up + 1), both
    at most 7 and up at least -7."""
    if kind == "swiglu":
        gate, up = inner.chunk(2, dim=-1)
        return F.silu(gate) * up
    if kind == "geglu_tanh":
        gate, up = inner.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * up
    if kind == "swiglu_clamped":
        gate, up = inner.chunk(2, dim=-1)
        gate = gate.clamp(max=LIMIT)
        return gate * (gate * SLOPE).sigmoid() * (up.clamp(-LIMIT, LIMIT) + 1)
    return F.gelu(inner, approximate="tanh" if kind == "gelu_tanh" else "none")

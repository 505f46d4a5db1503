"""Activations in plain torch."""

import torch.nn.functional as F
from torch import Tensor

SLOPE, LIMIT = 1.702, 7.0
"""The constants of swiglu_clamped (swiglu_alpha and swiglu_limit of gpt-oss)."""


def activate(inner: Tensor, kind: str) -> Tensor:
    """Apply the activation `kind`.

    gelu and gelu_tanh map [..., f] -> [..., f]. Gated kinds map [..., 2 f] -> [..., f], from gate, the first half, and
    up, the second: swiglu is silu(gate) up; geglu_tanh is gelu_tanh(gate) up; swiglu_clamped, as in gpt-oss, is
    gate sigmoid(1.702 gate) (up + 1), with both clamped to at most 7 and up to at least -7.
    """
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

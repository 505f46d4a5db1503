"""Activations in plain torch."""

from typing import Any

import torch
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
    if kind in ("gelu", "gelu_tanh"):
        return F.gelu(inner, approximate="tanh" if kind == "gelu_tanh" else "none")
    if torch.is_grad_enabled() and inner.requires_grad:
        out: Tensor = _Gated.apply(inner, kind)
        return out
    first, second = _factors(inner, kind)[:2]
    return first.mul_(second)


def _factors(inner: Tensor, kind: str) -> tuple[Tensor, ...]:
    """Return the two factors of a gated activation, of which the first is new memory; for swiglu_clamped also what
    SiLU was applied to."""
    gate, up = inner.chunk(2, dim=-1)
    if kind != "swiglu_clamped":
        return F.silu(gate) if kind == "swiglu" else F.gelu(gate, approximate="tanh"), up
    scaled = gate.clamp(max=LIMIT).mul_(SLOPE)
    return F.silu(scaled).div_(SLOPE), up.clamp(-LIMIT, LIMIT).add_(1), scaled


class _Gated(torch.autograd.Function):
    """Writes the gradients of gate and up where they belong; autograd alone would make more of them, and copy them."""

    @staticmethod
    def forward(ctx: Any, inner: Tensor, kind: str) -> Tensor:
        factors = _factors(inner, kind)
        ctx.save_for_backward(inner, *factors)
        ctx.kind = kind
        return factors[0] * factors[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        inner, first, second, *scaled = ctx.saved_tensors
        gate, up = inner.chunk(2, dim=-1)
        grad_inner = torch.empty_like(inner)
        of_gate, of_up = grad_inner.chunk(2, dim=-1)
        torch.mul(grads[0], first, out=of_up)
        torch.mul(grads[0], second, out=of_gate)
        if ctx.kind == "geglu_tanh":
            torch.ops.aten.gelu_backward.grad_input(of_gate, gate, approximate="tanh", grad_input=of_gate)
        else:
            torch.ops.aten.silu_backward.grad_input(of_gate, scaled[0] if scaled else gate, grad_input=of_gate)
        if scaled:
            of_up.masked_fill_(up.abs() > LIMIT, 0.0)
            of_gate.masked_fill_(gate > LIMIT, 0.0)
        return grad_inner, None

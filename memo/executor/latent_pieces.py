"""Queries, keys and values from the latents of multi-latent attention, with explicit forward and backward.

Every rank of tp has all latents, and makes its own heads of them; a backward gives its part of the latents' gradients.
Shapes as in memo.model.latent, on a tile of s tokens.
"""

from typing import Any

import torch
from torch import Tensor

from memo.executor.pieces import Gathering, GradientSink, column_backward, column_forward


def expand_forward(attention: Any, normed: Tensor, *queries: Tensor, out: Tensor | None) -> Tensor:
    """Return q, k and v side by side, in `out` if given. `queries`: the queries of a model without their latent."""
    of_q, of_kv, positions = attention.latents(normed)
    q = queries[0] if of_q is None else column_forward(of_q, attention.q)
    qkv: Tensor = attention.joined(q, column_forward(of_kv, attention.kv), positions, out)
    return qkv


def expand_backward(attention: Any, grad: Tensor, normed: Tensor, sink: GradientSink) -> tuple[Tensor, ...]:
    """Return the gradient of the normed latents, and that of queries without a latent."""
    of_q, of_kv, _ = attention.latents(normed)
    grad_q, grad_kv, grad_positions = attention.joined_backward(grad)
    found = [column_backward(grad_kv, Gathering(of_kv, None), attention.kv, None, sink), grad_positions]
    if of_q is None:
        return torch.cat(found, dim=-1), grad_q
    of_latent = column_backward(grad_q, Gathering(of_q, None), attention.q, None, sink)
    return (torch.cat([of_latent, *found], dim=-1),)

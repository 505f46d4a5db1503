"""Attention sinks (gpt-oss): one learned logit for each query head, which joins the softmax but has no value.

A sink z changes the output o and the log-sum-exp L of a query, which cover all blocks, to

    o' = sigmoid(L - z) o        L' = log(exp L + exp z)

With o' and L' the unchanged backward of attention gives the exact gradients of q, k and v. The gradient of the sink is

    dz = -(sum over queries of exp(z - L') (grad . o'))

Legend: s tokens, b batch, n query heads, d head dim; out [s, b, n, d] and lse [b, n, s] as in memo.attention.core.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from memo.spec.attention_workspace import SINK_TOKENS


class Sinks(NamedTuple):
    """The logits [n] of this rank's heads, and their gradient [n] in the wide dtype, to which a backward adds."""

    logits: Tensor
    gradient: Tensor | None = None

    def part(self, index: int, count: int) -> Sinks:
        """Views of one of `count` equal parts of the heads."""
        gradient = None if self.gradient is None else self.gradient.chunk(count)[index]
        return Sinks(self.logits.chunk(count)[index], gradient)

    def join_(self, out: Tensor, lse: Tensor) -> None:
        """Change the results of attention without sinks to those with sinks, in place."""
        logits = self.logits.to(lse.dtype)[:, None]
        for rows in _parts(out):
            weight = (lse[..., rows] - logits).sigmoid_()
            out[rows].mul_(weight.permute(2, 0, 1).unsqueeze(-1))
        torch.logaddexp(lse, logits, out=lse)

    def backward(self, grad_out: Tensor, out: Tensor, lse: Tensor) -> None:
        """Add to the logits' gradient, if there is one; `out` and `lse` are the results with sinks."""
        if self.gradient is None:  # frozen
            return
        logits = self.logits.to(lse.dtype)[:, None]
        for rows in _parts(out):
            given = (grad_out[rows].to(lse.dtype) * out[rows]).sum(-1).permute(1, 2, 0)  # [b, n, s]
            self.gradient.sub_((given * (logits - lse[..., rows]).exp_()).sum((0, 2)))


def _parts(out: Tensor) -> Iterator[slice]:
    """Ranges of rows of `out` to work on one after the other, because their wide copies take memory."""
    step = max(1, SINK_TOKENS // out.shape[1])
    return (slice(start, start + step) for start in range(0, out.shape[0], step))

"""Attention by torch's operations, on one square of the scores at a time: on any device, for any size of heads, and
with scores that are capped (Gemma 2):

    score -> cap tanh(score / cap)

Every score is written to memory and read several times, so it takes several times as long as fused kernels. Sums are in
the wide dtype; on GPUs the factors of products are in the model's dtype, as in FlashAttention.

Legend as in backends.py; g query heads for each key/value head. Of a square of r queries and c keys, queries are folded
to [b n_kv, g r, d], so that products of all heads that share keys are one product.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from memo.attention.backends import AttentionBackend, Saved, check_block
from memo.spec.attention_workspace import square_tokens
from memo_kernels import wide_dtype


class Squares(AttentionBackend):
    """The backend "torch". It sums in a fixed order, and accepts an output."""

    name = "torch"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        check_block(q, k, causal)
        wide = wide_dtype(q.dtype)
        out = q.new_empty(q.shape) if out is None else out
        lse = q.new_empty(q.shape[:3], dtype=wide)
        for rows, squares in _squares(q, k, causal):
            own, heads = q[:, :, rows], k.shape[1]
            total, running = torch.zeros_like(own, dtype=wide), torch.full_like(own[..., 0], -torch.inf, dtype=wide)
            for columns in squares:
                keys = k[:, :, columns]
                scores = self._scores(_folded(own, heads), _folded(keys, heads), scale, causal and columns == rows)
                largest = scores.amax(-1, keepdim=True)
                sums = scores.sub_(largest).exp_().sum(-1, keepdim=True)
                part = _product(scores, _folded(v[:, :, columns], heads), q.dtype).div_(sums)
                self.merge_(total, running, part.view_as(total), largest.add_(sums.log_()).view_as(running))
                del scores, part
            out[:, :, rows], lse[:, :, rows] = total, running
        return out, lse

    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse = saved
        check_block(q, k, causal)
        wide, heads = wide_dtype(q.dtype), k.shape[1]
        dq, dk, dv = (torch.zeros_like(x, dtype=wide, memory_format=torch.contiguous_format) for x in (q, k, v))
        for rows, squares in _squares(q, k, causal):
            of_rows = (grad_out[:, :, rows].to(wide) * out[:, :, rows]).sum(-1)
            queries, grads = _folded(q[:, :, rows], heads), _folded(grad_out[:, :, rows], heads)
            sums, of_rows = (x.reshape(*queries.shape[:2], 1) for x in (lse[:, :, rows], of_rows))
            for columns in squares:
                keys = _folded(k[:, :, columns], heads)
                scores = self._scores(queries, keys, scale, causal and columns == rows)
                probabilities = (scores - sums).exp_()
                _add(dv[:, :, columns], _product(probabilities.mT, grads, q.dtype))
                of_scores = _product(grads, _folded(v[:, :, columns], heads).mT, q.dtype).sub_(of_rows)
                of_scores.mul_(probabilities)
                del probabilities
                if self.softcap:  # times 1 - tanh^2; masked scores are -inf, and their gradients must stay zero
                    cap = self.softcap
                    of_scores.mul_(scores.clamp_(min=-cap).square_().sub_(cap**2)).mul_(-scale / cap**2)
                else:
                    of_scores.mul_(scale)
                del scores
                _add(dq[:, :, rows], _product(of_scores, keys, q.dtype))
                _add(dk[:, :, columns], _product(of_scores.mT, queries, q.dtype))
                del of_scores
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype)

    def _scores(self, queries: Tensor, keys: Tensor, scale: float, causal: bool) -> Tensor:
        """The capped scores of a square, [b n_kv, g r, c]; those that a causal square (r = c) leaves out are -inf."""
        scores = _product(queries, keys.mT, queries.dtype)
        if self.softcap:
            scores.mul_(scale / self.softcap).tanh_().mul_(self.softcap)
        else:
            scores.mul_(scale)
        if causal:
            tokens = keys.shape[1]
            later = torch.ones(tokens, tokens, dtype=torch.bool, device=keys.device).triu_(1)
            scores.view(-1, *later.shape).masked_fill_(later, -torch.inf)
        return scores


def _squares(q: Tensor, k: Tensor, causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """For each range of queries, the ranges of keys that it attends to."""
    size = square_tokens(q.shape[0] * q.shape[1])
    for rows in _ranges(q.shape[2], size):
        yield rows, _ranges(rows.stop if causal else k.shape[2], size)


def _ranges(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _folded(x: Tensor, heads: int) -> Tensor:
    """[b, n, s, d] -> [b heads, n / heads s, d]."""
    return x.reshape(x.shape[0] * heads, -1, x.shape[3])


def _product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product in the wide dtype of `dtype`; on GPUs the factors are rounded to `dtype`."""
    wide = wide_dtype(dtype)
    if a.is_cuda and dtype != wide:
        return torch.bmm(a.to(dtype), b.to(dtype), out_dtype=wide)
    return torch.bmm(a.to(wide), b.to(wide))


def _add(total: Tensor, folded: Tensor) -> None:
    """Add `folded` [b heads, ...] to a view [b, n, s, d]."""
    total.add_(folded.view(total.shape))

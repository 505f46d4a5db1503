"""Chunked, vocabulary-parallel linear cross-entropy: full logits never exist.

For hidden size h = 4096, a vocabulary of 50K and 1M tokens, fp32 logits alone would take 200 GB. Here
`chunk_size` tokens at a time are gathered, multiplied with the local vocabulary rows, and reduced
to one log-sum-exp; backward recomputes the logits of each chunk (one more head GEMM, about
2 h v of the 6 P FLOPs a token) instead of keeping anything of size s x v. Softmax is in fp32.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter
from memo.parallel.tensor import weight_gradient


@dataclass(frozen=True)
class VocabSlice:
    """Which vocabulary rows this rank holds: [first, first + num_rows), of which num_valid are real."""

    first: int
    num_rows: int
    num_valid: int

    @classmethod
    def of(cls, vocab_size: int, num_rows: int, group: ProcessGroup | None) -> "VocabSlice":
        first = group_rank(group) * num_rows
        return cls(first, num_rows, max(0, min(num_rows, vocab_size - first)))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    chunk_size: int,
    group: ProcessGroup | None,
) -> Tensor:
    """Negative log-likelihood of every token of this context-parallel rank.

    Which tokens count, and how much, is for the caller: the gradient of a loss that is multiplied by zero is zero.

    Args:
        hidden: [n, b, h], this tp rank's tokens (n = s / tp).
        weight: [v_local, h], this rank's vocabulary rows, padding included.
        labels: [s, b] int64, all tokens of the context-parallel rank.
        vocab_size: real rows of the whole vocabulary.
        chunk_size: tokens whose logits exist at one time.

    Returns:
        [s, b] in fp32 (fp64 for fp64 inputs), the same on every tp rank.
    """
    vocab = VocabSlice.of(vocab_size, weight.shape[0], group)
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, vocab, chunk_size, group)
    return losses


@torch.no_grad()
def greedy_tokens(
    hidden: Tensor, weight: Tensor, *, vocab_size: int, chunk_size: int, group: ProcessGroup | None
) -> Tensor:
    """The likeliest next token after each token, [s, b] int64; of equal logits the lowest. Arguments as above."""
    vocab = VocabSlice.of(vocab_size, weight.shape[0], group)
    found = hidden.new_empty((hidden.shape[0] * group_size(group), hidden.shape[1]), dtype=torch.int64)
    found_rows = _by_rank(found, group)
    for rows in _row_ranges(hidden, chunk_size, group):
        logits = _logits(all_gather(hidden[rows], group), weight, vocab)
        best, token = logits.max(-1)
        is_best = best == all_reduce(best.clone(), group, "max")
        token = (token + vocab.first).masked_fill(~is_best, vocab_size)
        found_rows[:, rows] = all_reduce(token, group, "min").view_as(found_rows[:, rows])
    return found


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        vocab: VocabSlice,
        chunk_size: int,
        group: ProcessGroup | None,
    ) -> Tensor:
        losses, log_sum_exp = _forward(hidden, weight, labels, vocab, chunk_size, group)
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp)
        ctx.vocab, ctx.chunk_size, ctx.group = vocab, chunk_size, group
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        vocab, group = ctx.vocab, ctx.group
        label_rows, lse_rows, grad_rows = (_by_rank(t, group) for t in (labels, log_sum_exp, grads[0].contiguous()))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=log_sum_exp.dtype)  # sums over chunks are not in bf16
        for rows in _row_ranges(hidden, ctx.chunk_size, group):
            gathered = all_gather(hidden[rows], group)
            grad = _logits(gathered, weight, vocab)
            grad.sub_(lse_rows[:, rows].flatten().unsqueeze(-1)).exp_()
            local, mine = _local_labels(label_rows[:, rows].flatten(), vocab)
            grad.scatter_add_(-1, local.unsqueeze(-1), -mine.to(grad.dtype).unsqueeze(-1))
            grad.mul_(grad_rows[:, rows].flatten().unsqueeze(-1))
            grad_logits = grad.to(weight.dtype)
            del grad
            grad_gathered = (grad_logits @ weight).view_as(gathered)
            grad_hidden[rows] = reduce_scatter(grad_gathered, group)
            grad_weight += weight_gradient(grad_logits, gathered.flatten(0, 1))
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None, None


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, vocab: VocabSlice, chunk_size: int, group: ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp of all tokens, both [s, b], a chunk at a time."""
    losses = torch.empty(labels.shape, dtype=_softmax_dtype(hidden.dtype), device=hidden.device)
    log_sum_exp = torch.empty_like(losses)
    label_rows, loss_rows, lse_rows = (_by_rank(t, group) for t in (labels, losses, log_sum_exp))
    for rows in _row_ranges(hidden, chunk_size, group):
        logits = _logits(all_gather(hidden[rows], group), weight, vocab)
        lse, target = _reduce(logits, label_rows[:, rows].flatten(), vocab, group)
        lse_rows[:, rows] = lse.view_as(lse_rows[:, rows])
        loss_rows[:, rows] = (lse - target).view_as(loss_rows[:, rows])
    return losses, log_sum_exp


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_ranges(hidden: Tensor, chunk_size: int, group: ProcessGroup | None) -> list[slice]:
    """Ranges of local rows whose gathered tokens number at most chunk_size (at least one row each)."""
    num_rows, batch = hidden.shape[:2]
    step = max(1, chunk_size // (group_size(group) * batch))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


def _by_rank(tokens: Tensor, group: ProcessGroup | None) -> Tensor:
    """[s, b] -> [tp, n, b]: rows `[:, i:j]` are the tokens that gathering rows i:j of each rank gives."""
    return tokens.view(group_size(group), -1, tokens.shape[1])


def _logits(gathered: Tensor, weight: Tensor, vocab: VocabSlice) -> Tensor:
    """[c * b, v_local] in the softmax dtype; padding rows of the vocabulary get -inf."""
    logits = (gathered.flatten(0, 1) @ weight.t()).to(_softmax_dtype(gathered.dtype))
    if vocab.num_valid < vocab.num_rows:
        logits[:, vocab.num_valid :] = float("-inf")
    return logits


def _local_labels(labels: Tensor, vocab: VocabSlice) -> tuple[Tensor, Tensor]:
    """Labels as local rows (0 where another rank holds them) and the mask of those held here."""
    local = labels - vocab.first
    mine = (local >= 0) & (local < vocab.num_valid)
    return local.masked_fill(~mine, 0), mine


def _reduce(logits: Tensor, labels: Tensor, vocab: VocabSlice, group: ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the whole vocabulary and the label's logit, both [c * b]; destroys logits."""
    local, mine = _local_labels(labels, vocab)
    target = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1).masked_fill(~mine, 0.0)
    maximum = all_reduce(logits.amax(-1), group, "max")
    sums = torch.stack([logits.sub_(maximum.unsqueeze(-1)).exp_().sum(-1), target])
    total, target = all_reduce(sums, group)
    return maximum + total.log(), target

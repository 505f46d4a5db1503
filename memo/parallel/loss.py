"""Chunked, vocabulary-parallel linear cross-entropy behind a norm: full logits never exist.

For hidden size h = 4096, a vocabulary of 50K and 1M tokens, fp32 logits alone would take 200 GB. Here
`chunk_size` tokens at a time are normed, gathered, multiplied with the local vocabulary rows, and reduced
to one log-sum-exp; backward recomputes the norm and the logits of each chunk (one more head GEMM, about
2 h v of the 6 P FLOPs a token) instead of keeping anything of size s x v. Softmax is in fp32.
The logits are in the model's dtype, and their gradient overwrites them (memo_kernels.cross_entropy). So does the
gradient of the hidden states: besides them, nothing of size s x h exists either.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter
from memo.parallel.replayed import Replayed
from memo.parallel.tensor import weight_gradient
from memo_kernels import Ops, select_ops


@dataclass(frozen=True)
class VocabSlice:
    """The vocabulary rows of this rank, [first, first + num_rows); those after the first num_valid are padding."""

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
    norm: nn.Module,
    vocab_size: int,
    chunk_size: int,
    group: ProcessGroup | None,
    ops: Ops | None = None,
) -> Tensor:
    """Negative log-likelihood of every token of this context-parallel rank.

    The caller multiplies each token's loss by its weight; a weight of zero excludes a token.

    Backward writes the gradient of `hidden` over it, chunk by chunk, so nobody may read `hidden` from then on. Where
    autograd has kept `hidden` for another backward, or for a second one of the loss, that raises RuntimeError.

    Args:
        hidden: [n, b, h], this tp rank's tokens (n = s / tp).
        norm: from rows of `hidden` [..., b, h] to as many that meet the weight; of each token by itself.
        weight: [v_local, h], this rank's vocabulary rows, padding included.
        labels: [s, b] int64, all tokens of the context-parallel rank.
        vocab_size: rows of the whole vocabulary, without padding.
        chunk_size: number of tokens whose logits exist at one time.
        ops: the kernels of softmax and its gradient; None: torch's.

    Returns:
        [s, b] in fp32 (fp64 for fp64 inputs), the same on every tp rank.
    """
    vocab = VocabSlice.of(vocab_size, weight.shape[0], group)
    how = _How(norm, vocab, chunk_size, group, select_ops("torch", hidden.dtype) if ops is None else ops)
    losses: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, how, *norm.parameters())
    return losses


@torch.no_grad()
def greedy_tokens(
    hidden: Tensor, weight: Tensor, *, norm: nn.Module, vocab_size: int, chunk_size: int, group: ProcessGroup | None
) -> Tensor:
    """The likeliest next token after each token, [s, b] int64; of equal logits the lowest. Arguments as above."""
    vocab = VocabSlice.of(vocab_size, weight.shape[0], group)
    found = hidden.new_empty((hidden.shape[0] * group_size(group), hidden.shape[1]), dtype=torch.int64)
    found_rows = _by_rank(found, group)
    for rows in _row_ranges(hidden, chunk_size, group):
        logits = _logits(all_gather(norm(hidden[rows]), group), weight).to(_softmax_dtype(hidden.dtype))
        logits[:, vocab.num_valid :] = float("-inf")
        best, token = logits.max(-1)
        is_best = best == all_reduce(best.clone(), group, "max")
        token = (token + vocab.first).masked_fill(~is_best, vocab_size)
        found_rows[:, rows] = all_reduce(token, group, "min").view_as(found_rows[:, rows])
    return found


@dataclass(frozen=True)
class _How:
    """The settings that forward and backward of the loss share."""

    norm: nn.Module
    vocab: VocabSlice
    chunk_size: int
    group: ProcessGroup | None
    ops: Ops


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, how: _How, *of_norm: nn.Parameter) -> Tensor:
        losses, log_sum_exp = _forward(hidden, weight, labels, how)
        ctx.save_for_backward(hidden, weight, labels, log_sum_exp)
        ctx.how, ctx.of_norm = how, of_norm
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, log_sum_exp = ctx.saved_tensors
        of_tokens = [_by_rank(t, ctx.how.group) for t in (labels, log_sum_exp, grads[0].contiguous())]
        # Sums over chunks are not in bf16.
        sums = {parameter: torch.zeros_like(parameter, dtype=log_sum_exp.dtype) for parameter in ctx.of_norm}
        grad_weight = torch.zeros_like(weight, dtype=log_sum_exp.dtype)
        for rows in _row_ranges(hidden, ctx.how.chunk_size, ctx.how.group):
            _backward(
                hidden[rows], weight, [tokens[:, rows].flatten() for tokens in of_tokens], grad_weight, sums, ctx.how
            )
        of_norm = [total.to(parameter.dtype) for parameter, total in sums.items()]
        return hidden.detach(), grad_weight.to(weight.dtype), None, None, *of_norm


def _backward(
    hidden: Tensor,
    weight: Tensor,
    of_tokens: list[Tensor],
    grad_weight: Tensor,
    sums: dict[nn.Parameter, Tensor],
    how: _How,
) -> None:
    """One chunk, whose tensors are gone before the next chunk's are made.

    Args:
        hidden: its rows, overwritten by their gradient.
        of_tokens: label, log-sum-exp and gradient of the loss of each of its tokens, as gathered.
        grad_weight, sums: the chunk's part is added to the gradients of the weight and of the norm's parameters.
    """
    labels, log_sum_exp, grad_losses = of_tokens
    norm = Replayed(how.norm, hidden, sums)
    gathered = all_gather(norm.output, how.group)
    grad_logits = _logits(gathered, weight)
    how.ops.logit_gradient_(
        grad_logits, _local_labels(labels, how.vocab), log_sum_exp, grad_losses, how.vocab.num_valid
    )
    grad_normed = reduce_scatter((grad_logits @ weight).view_as(gathered), how.group)
    grad_weight += weight_gradient(grad_logits, gathered.flatten(0, 1))
    del gathered, grad_logits
    hidden.copy_(norm.backward(sums.__getitem__, grad_normed))


def _forward(hidden: Tensor, weight: Tensor, labels: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    """Losses and log-sum-exp of all tokens, both [s, b], a chunk at a time."""
    group = how.group
    losses = torch.empty(labels.shape, dtype=_softmax_dtype(hidden.dtype), device=hidden.device)
    log_sum_exp = torch.empty_like(losses)
    label_rows, loss_rows, lse_rows = (_by_rank(t, group) for t in (labels, losses, log_sum_exp))
    for rows in _row_ranges(hidden, how.chunk_size, group):
        logits = _logits(all_gather(how.norm(hidden[rows]), group), weight)
        lse, target = _reduce(logits, label_rows[:, rows].flatten(), how)
        del logits  # before the next chunk's are made
        lse_rows[:, rows] = lse.view_as(lse_rows[:, rows])
        loss_rows[:, rows] = (lse - target).view_as(loss_rows[:, rows])
    return losses, log_sum_exp


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _row_ranges(hidden: Tensor, chunk_size: int, group: ProcessGroup | None) -> list[slice]:
    """Ranges of local rows, at least one row each, that give at most chunk_size tokens once they are gathered."""
    num_rows, batch = hidden.shape[:2]
    step = max(1, chunk_size // (group_size(group) * batch))
    return [slice(i, min(i + step, num_rows)) for i in range(0, num_rows, step)]


def _by_rank(tokens: Tensor, group: ProcessGroup | None) -> Tensor:
    """[s, b] -> [tp, n, b]: rows `[:, i:j]` are the tokens that gathering rows i:j of each rank gives."""
    return tokens.view(group_size(group), -1, tokens.shape[1])


def _logits(gathered: Tensor, weight: Tensor) -> Tensor:
    """[c * b, v_local]; the logits of padding rows have no meaning."""
    return gathered.flatten(0, 1) @ weight.t()


def _local_labels(labels: Tensor, vocab: VocabSlice) -> Tensor:
    """Labels as local rows, -1 where another rank holds them."""
    local = labels - vocab.first
    return local.masked_fill((local < 0) | (local >= vocab.num_valid), -1)


def _reduce(logits: Tensor, labels: Tensor, how: _How) -> tuple[Tensor, Tensor]:
    """Log-sum-exp over the whole vocabulary and the logit of the label, both [c * b]; overwrites `logits`."""
    maximum, total, target = how.ops.logit_sums(
        logits,
        _local_labels(labels, how.vocab),
        how.vocab.num_valid,
        lambda own: all_reduce(own, how.group, "max"),
    )
    total, target = all_reduce(torch.stack([total, target]), how.group)
    return maximum + total.log(), target

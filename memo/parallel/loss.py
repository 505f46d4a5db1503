"""Chunked, vocabulary-parallel linear cross-entropy behind a norm: full logits never exist.

For hidden size h = 4096, a vocabulary of 50K and 1M tokens, fp32 logits alone would take 200 GB. Here
`chunk_size` tokens at a time are normed, gathered, multiplied with the local vocabulary rows, and reduced
to one log-sum-exp. In training all of this happens in backward, which has the logits of a chunk only once: from them
come the chunk's losses and, right after, its gradients. Softmax is in fp32.
The logits are in the model's dtype, and their gradient overwrites them (memo_kernels.cross_entropy). The gradient of
the hidden states overwrites the hidden states, so no second tensor of size s x h exists either.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.parallel.collectives import all_gather, all_reduce, group_rank, group_size, reduce_scatter
from memo.parallel.hidden import Hidden, Section, in_one_section
from memo.parallel.replayed import Replayed
from memo.parallel.weight_gradients import add_weight_gradient, gradient_added, own_sum
from memo_kernels import Ops, select_ops, wide_dtype


@dataclass(frozen=True)
class VocabSlice:
    """The vocabulary rows of this rank, [first, first + num_rows); rows after the first num_valid are padding."""

    first: int
    num_rows: int
    num_valid: int

    @classmethod
    def of(cls, vocab_size: int, num_rows: int, group: ProcessGroup | None) -> "VocabSlice":
        first = group_rank(group) * num_rows
        return cls(first, num_rows, max(0, min(num_rows, vocab_size - first)))


@dataclass(frozen=True)
class LossSettings:
    """How hidden states become logits and losses.

    Attributes:
        norm: maps hidden states [..., b, h], token by token, to the inputs of the head's matrix.
        vocab_size: rows of the whole vocabulary, without padding.
        chunk_size: maximum number of tokens whose logits exist at one time.
        ops: the kernels of softmax and its gradient; None: torch's.
        parts: gives the sections of the hidden states; no chunk crosses a tile of theirs. None: one section.
        softcap: the cap of logits, softcap x tanh(logit / softcap); 0: there is none.
    """

    norm: nn.Module
    vocab_size: int
    chunk_size: int
    group: ProcessGroup | None
    ops: Ops | None = None
    parts: Hidden | None = None
    softcap: float = 0.0

    def resolved(self, hidden: Tensor, weight: Tensor) -> "_Resolved":
        ops = select_ops("torch", hidden.dtype) if self.ops is None else self.ops
        parts = in_one_section(hidden.shape[0]) if self.parts is None else self.parts
        vocab = VocabSlice.of(self.vocab_size, weight.shape[0], self.group)
        known = {**vars(self), "ops": ops, "parts": parts}
        return _Resolved(**known, vocab=vocab)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, labels: Tensor, settings: LossSettings, weights: Tensor
) -> Tensor:
    """The sum over the tokens of this context-parallel rank of a token's weight times its negative log-likelihood.

    A weight of zero excludes a token. **The sum is NaN until its backward has run**, which computes it beside the
    gradients.

    Backward overwrites `hidden` with its gradient, chunk by chunk, so no code may read `hidden` afterwards. If autograd
    has saved `hidden` for a different backward, or the loss has a second backward, that raises RuntimeError.

    Args:
        hidden: [n, b, h], this tp rank's tokens (n = s / tp).
        weight: [v_local, h], this rank's vocabulary rows, padding included.
        labels: [s, b] int32 or int64, all tokens of the context-parallel rank.
        weights: [s, b] fp64, without gradients.

    Returns the sum, a scalar in fp64, the same on every tp rank.
    """
    resolved = settings.resolved(hidden, weight)
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, labels, weights, resolved, *resolved.norm.parameters())
    return loss


@torch.no_grad()
def token_losses(hidden: Tensor, weight: Tensor, labels: Tensor, settings: LossSettings) -> Tensor:
    """Return the negative log-likelihood of every token of this context-parallel rank, [s, b] in fp32 (fp64 for fp64
    inputs), the same on every tp rank. Arguments as for `linear_cross_entropy`; `hidden` is only read."""
    return _forward(hidden, weight, labels, settings.resolved(hidden, weight))


@torch.no_grad()
def losses_and_greedy_tokens(
    hidden: Tensor, weight: Tensor, labels: Tensor, settings: LossSettings
) -> tuple[Tensor, Tensor]:
    """Return the losses of `token_losses`, and the likeliest next token after each token, [s, b] int64.

    Among tokens with equal logits it is the lowest. Reads the hidden states once.
    """
    resolved = settings.resolved(hidden, weight)
    greedy = torch.empty_like(labels, dtype=torch.int64)
    return _forward(hidden, weight, labels, resolved, greedy), greedy


@torch.no_grad()
def logits_of(hidden: Tensor, weight: Tensor, numbers: Tensor, count: int, settings: LossSettings) -> Tensor:
    """Return the next-token logits after `count` selected tokens: [count, vocabulary] fp64, equal on every tp rank.

    `numbers` [s, b] int64: the row of the result for each selected token, -1 for all other tokens. A row that no token
    of this context-parallel rank selects is zero. Other arguments as for `linear_cross_entropy`.
    """
    resolved, group = settings.resolved(hidden, weight), settings.group
    own = _by_rank(numbers, group)[group_rank(group)]
    rows = hidden.new_zeros(count, hidden.shape[-1])
    for section in resolved.parts.sections:
        part, wanted = resolved.parts.take(hidden, section.index), own[section.rows]
        rows.index_add_(0, wanted[wanted >= 0], part[wanted >= 0])
    rows = all_reduce(rows, group)  # only one rank has each row, and all others add zeros
    asked = numbers[numbers >= 0]
    logits = hidden.new_zeros(group_size(group), count, weight.shape[0], dtype=torch.float64)
    logits[group_rank(group), asked] = _logits(resolved.norm(rows.unsqueeze(1)), weight, resolved)[asked].double()
    return all_reduce(logits, group).transpose(0, 1).flatten(1)[:, : settings.vocab_size]


@dataclass(frozen=True, kw_only=True)
class _Resolved(LossSettings):
    """The settings, with what follows from the tensors."""

    ops: Ops
    parts: Hidden
    vocab: VocabSlice


class _LinearCrossEntropy(torch.autograd.Function):
    """Forward only saves its inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor,
        resolved: _Resolved,
        *of_norm: nn.Parameter,
    ) -> Tensor:
        loss = weights.new_full((), float("nan"))
        ctx.save_for_backward(hidden, weight, labels, weights)
        ctx.resolved, ctx.owner, ctx.of_norm = resolved, weight, of_norm
        ctx.loss = loss.detach()  # the same memory, without a reference from the graph to itself
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, weights = ctx.saved_tensors
        resolved, wide = ctx.resolved, wide_dtype(hidden.dtype)
        # Sums over chunks are not in bf16.
        sums = {p: torch.zeros_like(p, dtype=wide) for p in ctx.of_norm if p.requires_grad}
        is_trained, main = ctx.needs_input_grad[1], own_sum(ctx.owner)
        grad_weight = torch.zeros_like(weight, dtype=wide) if main is None and is_trained else main
        ctx.loss.zero_()
        for section in resolved.parts.sections:
            part = resolved.parts.take(hidden, section.index)
            for own, rows in _row_ranges(section, part.shape[1], resolved):
                of_tokens = [_read(tokens, rows, resolved.group) for tokens in (labels, weights)]
                ctx.loss += _backward(part[own], weight, of_tokens, grads[0], grad_weight, sums, resolved)
                del of_tokens
            resolved.parts.put(part, section.index)
        of_norm = [sums[p].to(p.dtype) if p.requires_grad else None for p in ctx.of_norm]
        of_weight = grad_weight.to(weight.dtype) if main is None and grad_weight is not None else None
        if main is not None:
            gradient_added(ctx.owner)
        return hidden.detach(), of_weight, None, None, None, *of_norm


def _backward(
    hidden: Tensor,
    weight: Tensor,
    of_tokens: list[Tensor],
    grad: Tensor,
    grad_weight: Tensor | None,
    sums: dict[nn.Parameter, Tensor],
    resolved: _Resolved,
) -> Tensor:
    """Return the weighted sum of the losses of one chunk, after its backward; its tensors are freed before the next
    chunk allocates.

    Args:
        hidden: the chunk's rows, overwritten by their gradient.
        of_tokens: label and weight of each token of the chunk, in gathered order.
        grad: the gradient of the sum of all losses.
        grad_weight, sums: gradients of the weight and of the norm's parameters, to which the chunk adds. Frozen ones
            are None, or missing in `sums`.
    """
    labels, weights = of_tokens
    norm = Replayed(resolved.norm, hidden, parameters=sums)
    gathered = all_gather(norm.output, resolved.group)
    logits = _logits(gathered, weight, resolved)
    slopes = _slopes(logits, resolved.softcap) if resolved.softcap else None
    local = _local_labels(labels, resolved.vocab)
    maximum, total, target, exponentials = _reduce(logits, local, resolved)
    loss = (_losses(maximum, total, target) * weights).sum()
    of_losses = (grad * weights).to(total.dtype)
    resolved.ops.logit_gradient_(logits, exponentials, local, maximum, total, of_losses, resolved.vocab.num_valid)
    del exponentials
    if slopes is not None:
        logits.mul_(slopes)
        del slopes
    grad_normed = reduce_scatter((logits @ weight).view_as(gathered), resolved.group)
    add_weight_gradient(grad_weight, logits, gathered.flatten(0, 1))
    del gathered, logits
    hidden.copy_(norm.backward(sums.__getitem__, grad_normed)[0])
    return loss


def _forward(
    hidden: Tensor, weight: Tensor, labels: Tensor, resolved: _Resolved, greedy: Tensor | None = None
) -> Tensor:
    """Return the losses of all tokens [s, b]. Works on one chunk at a time; writes the likeliest tokens to `greedy`."""
    group = resolved.group
    losses = torch.empty_like(labels, dtype=wide_dtype(hidden.dtype))
    for section in resolved.parts.sections:
        part = resolved.parts.take(hidden, section.index)
        for own, rows in _row_ranges(section, part.shape[1], resolved):
            logits = _logits(all_gather(resolved.norm(part[own]), group), weight, resolved)
            if greedy is not None:
                _write(greedy, rows, _greedy(logits, resolved), group)
            local = _local_labels(_read(labels, rows, group), resolved.vocab)
            _write(losses, rows, _losses(*_reduce(logits, local, resolved)[:3]), group)
            del logits  # before the next chunk allocates its own
    return losses


def _row_ranges(section: Section, batch: int, resolved: _Resolved) -> list[tuple[slice, slice]]:
    """Ranges of local rows that give at most chunk_size tokens when gathered, but have at least one row each; none
    crosses a tile. Each is given twice: counted from the section's first row, and from the first row of all."""
    step, first = max(1, resolved.chunk_size // (group_size(resolved.group) * batch)), section.rows.start
    own = [slice(i, min(i + step, tile.stop)) for tile in section.tiles for i in range(tile.start, tile.stop, step)]
    return [(rows, slice(first + rows.start, first + rows.stop)) for rows in own]


def _by_rank(tokens: Tensor, group: ProcessGroup | None) -> Tensor:
    """[s, b] -> [tp, n, b]: `[:, i:j]` are the tokens that a gather of rows i:j of each rank returns."""
    return tokens.view(group_size(group), -1, tokens.shape[1])


def _read(tokens: Tensor, rows: slice, group: ProcessGroup | None) -> Tensor:
    """Return one chunk of values of tokens [s, b], in gathered order: [c * b]."""
    return _by_rank(tokens, group)[:, rows].flatten()


def _write(tokens: Tensor, rows: slice, values: Tensor, group: ProcessGroup | None) -> None:
    """Write values [c * b] of one chunk, in gathered order, to `tokens` [s, b]."""
    place = _by_rank(tokens, group)[:, rows]
    place.copy_(values.view_as(place))


def _logits(gathered: Tensor, weight: Tensor, resolved: _Resolved) -> Tensor:
    """[c * b, v_local]; the logits of padding rows have no meaning."""
    logits, cap = gathered.flatten(0, 1) @ weight.t(), resolved.softcap
    return logits.div_(cap).tanh_().mul_(cap) if cap else logits


def _slopes(capped: Tensor, cap: float) -> Tensor:
    """The derivatives of capped logits, 1 - tanh^2."""
    return capped.div(cap).square_().neg_().add_(1.0)


def _greedy(logits: Tensor, resolved: _Resolved) -> Tensor:
    """The token with the largest logit over all ranks, [c * b]; among equal logits the lowest token."""
    vocab, none = resolved.vocab, torch.iinfo(torch.int64).max
    logits = logits.to(wide_dtype(logits.dtype))
    logits[:, vocab.num_valid :] = float("-inf")
    best, token = logits.max(-1)
    is_best = best == all_reduce(best.clone(), resolved.group, "max")
    return all_reduce((token + vocab.first).masked_fill(~is_best, none), resolved.group, "min")


def _local_labels(labels: Tensor, vocab: VocabSlice) -> Tensor:
    """Labels as local rows, -1 where another rank holds them."""
    local = labels.to(torch.int64) - vocab.first
    return local.masked_fill((local < 0) | (local >= vocab.num_valid), -1)


def _reduce(logits: Tensor, local: Tensor, resolved: _Resolved) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return maximum and sum of exponentials over the whole vocabulary, and the logit of the label, each [c * b], and
    the exponentials; overwrites `logits`."""
    maximum, total, target, exponentials = resolved.ops.logit_sums(
        logits, local, resolved.vocab.num_valid, lambda own: all_reduce(own, resolved.group, "max")
    )
    total, target = all_reduce(torch.stack([total, target]), resolved.group)
    return maximum, total, target, exponentials


def _losses(maximum: Tensor, total: Tensor, target: Tensor) -> Tensor:
    return maximum + total.log() - target

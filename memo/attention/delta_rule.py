"""The gated delta net (Yang et al., "Gated Delta Networks", 2024; Qwen3-Next): a short convolution over the channels of
q, k and v, and a rule by which each head carries a matrix S from token to token:

    S_i = exp(g_i) S_{i-1} + beta_i k_i (v_i - (exp(g_i) S_{i-1})^T k_i)^T        out_i = S_i^T q_i / sqrt(d)

It is computed in chunks: within a chunk by a triangular system over its tokens (the paper, section 3.2), and from chunk
to chunk through S. The state that passes from a range of tokens to the next is a `carry`: S, and the last inputs of the
convolution. A document begins with S = 0 and with zeros before it in the convolution.

Legend: t tokens, b batch, n value heads, m key heads, each of which serves n / m consecutive value heads, d head dim,
C = (2 m + n) d channels. `mixed` [t, b, C + 2 n] holds q, k and v of a token, then the logits of beta and of the decay
of each value head; positions [b, t] count, for each token, the tokens of its document before it. The rule is computed
in the wide dtype, by torch's operations; memo.attention.delta_kernels computes it with Triton kernels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from memo.attention.backends import numbers_on
from memo.attention.blocks import Documents
from memo.spec.delta import CHUNK, TAPS, carry_size, group_tokens
from memo_kernels import wide_dtype

_EPSILON = 1e-6
"""Epsilon of the norms of q and k."""


class Place(NamedTuple):
    """The place of a range of tokens: the document boundaries of each sequence (None: each is one document), and the
    position in the sequence at which the range begins."""

    documents: Documents | None
    start: int

    def positions(self, like: Tensor) -> Tensor:
        """For each token of `like` [t, b, ...], the number of tokens of its document before it: [b, t].

        They are counted on the host, so that the device gets the same requests wherever documents end.
        """
        if self.documents is None:
            return torch.arange(self.start, self.start + len(like), device=like.device).expand(like.shape[1], -1)
        tokens = np.arange(self.start, self.start + len(like))
        begins = [bounds[np.searchsorted(bounds, tokens, "right") - 1] for bounds in map(np.asarray, self.documents)]
        return numbers_on(tokens - np.stack(begins), like.device, torch.int64)


class DeltaNet(NamedTuple):
    """The parameters of some heads, in the order of `mixed`: convolution kernels [C, TAPS], and for each value head the
    logarithm of its decay rate [n] and a bias [n]."""

    kernels: Tensor
    rates: Tensor
    biases: Tensor
    head_dim: int

    @property
    def heads(self) -> int:
        return self.rates.shape[0]

    @property
    def key_heads(self) -> int:
        return (self.kernels.shape[0] // self.head_dim - self.heads) // 2

    def empty_carry(self, mixed: Tensor) -> Tensor:
        """The carry at the beginning of a sequence: [b, elements], in the wide dtype."""
        size = carry_size(self.heads, self.key_heads, self.head_dim)
        return mixed.new_zeros((mixed.shape[1], size), dtype=wide_dtype(mixed.dtype))

    def groups(self, mixed: Tensor, place: Place) -> list[tuple[slice, Any]]:
        """The ranges of rows that are computed at a time, each with its argument `where` for `run`."""
        rows, positions = group_tokens(self.heads, mixed.shape[1]), place.positions(mixed)
        return [(slice(at, at + rows), positions[:, at : at + rows]) for at in range(0, len(mixed), rows)]

    def run(self, mixed: Tensor, carry: Tensor, where: Any) -> tuple[Tensor, Tensor]:
        """One group: out [t, b, n d] in the dtype of `mixed`, and the carry after it. `where`: as `groups` has it."""
        batch, heads, d, channels, wide = mixed.shape[1], self.heads, self.head_dim, len(self.kernels), carry.dtype
        last, state = carry.split([(TAPS - 1) * channels, heads * d * d], dim=1)
        last, state = last.view(batch, TAPS - 1, channels).transpose(0, 1), state.view(batch, heads, d, d)
        x, of_beta, of_decay = mixed.split([channels, heads, heads], dim=-1)
        decay = -self.rates.to(wide).exp() * F.softplus(of_decay.to(wide) + self.biases.to(wide))
        out, last, state = self.compute(x, last, state, of_beta.sigmoid().to(wide), decay, where)
        return out, torch.cat((last.transpose(0, 1).flatten(1), state.flatten(1)), dim=1)

    def compute(
        self, x: Tensor, last: Tensor, state: Tensor, beta: Tensor, decay: Tensor, where: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Convolution and rule: out, and what goes on: the last TAPS - 1 inputs and S, as before x [t, b, C] in `last`
        [TAPS - 1, b, C] and `state` [b, n, d, d]; `decay` [t, b, n] are the logarithms of factors."""
        with_last = torch.cat((last, x.to(last.dtype)))
        convolved = _convolved(with_last, self.kernels.to(last.dtype), where)
        mixed = F.silu(convolved.to(x.dtype)).to(last.dtype).unflatten(-1, (-1, self.head_dim))
        *parts, v = mixed.split([self.key_heads, self.key_heads, self.heads], dim=2)
        q, k = (_normed(part).repeat_interleave(self.heads // self.key_heads, dim=2) for part in parts)
        out, state = _rule(q * self.head_dim**-0.5, k, v, beta, decay, where, state)
        return out.flatten(2).to(x.dtype), with_last[-(TAPS - 1) :], state


class Gradients(NamedTuple):
    """The memory for what a backward computes: `mixed` receives a gradient, that of the last carry is overwritten by
    that of the first, and the parameters' gradients are added to sums in the wide dtype."""

    mixed: Tensor
    carry: Tensor
    kernels: Tensor
    rates: Tensor
    biases: Tensor


def forward(net: DeltaNet, mixed: Tensor, carry: Tensor, place: Place, out: Tensor, after: Tensor) -> None:
    """Compute `out` [t, b, n d], and `after`, the carry after these tokens; both are overwritten."""
    for rows, where in net.groups(mixed, place):
        out[rows], carry = net.run(mixed[rows], carry, where)
    after.copy_(carry)


def backward(net: DeltaNet, grad_out: Tensor, mixed: Tensor, carry: Tensor, place: Place, gradients: Gradients) -> None:
    groups, carries = net.groups(mixed, place), [carry]
    for rows, where in groups[:-1]:
        carries.append(net.run(mixed[rows], carries[-1], where)[1])
    of_carry = gradients.carry
    for rows, where in reversed(groups):
        given = (mixed[rows], carries.pop(), *net[:3])
        gradients.mixed[rows], of_carry, *found = _run_backward(net, given, where, (grad_out[rows], of_carry))
        for total, part in zip(gradients[2:], found, strict=True):
            total.add_(part)
    gradients.carry.copy_(of_carry)


def _run_backward(
    net: DeltaNet, given: tuple[Tensor, ...], where: Any, grads: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Gradients of the outputs of `run` for one group -> gradients of its inputs and of the parameters."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in given]
        own = net._replace(kernels=inputs[2], rates=inputs[3], biases=inputs[4])
        outputs = own.run(inputs[0], inputs[1], where)
    return torch.autograd.grad(outputs, inputs, grads)


def _convolved(x: Tensor, kernels: Tensor, positions: Tensor) -> Tensor:
    """Convolve x [TAPS - 1 + t, b, C] -> [t, b, C]: each token with those just before it in its document."""
    taps, length = kernels.shape[1], positions.shape[1]
    found = x[taps - 1 :] * kernels[:, -1]
    for back in range(1, taps):
        reaches = (positions >= back).t().unsqueeze(-1)
        found = found + x[taps - 1 - back : taps - 1 - back + length] * kernels[:, -1 - back] * reaches
    return found


def _normed(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + _EPSILON).rsqrt()


def _rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, positions: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k, v [t, b, n, d], beta and decay (the logarithm of a factor) [t, b, n], state [b, n, d, d]
    -> out [t, b, n, d] and the state after these tokens."""
    length = len(q)
    q, k, v, beta, decay = (_in_chunks(x) for x in (q, k, v, beta.unsqueeze(-1), decay.unsqueeze(-1)))
    size, chunks = q.shape[-2], q.shape[2]
    past = chunks * size - length
    positions = torch.cat((positions, positions[:, -1:] + torch.arange(1, past + 1, device=q.device)), dim=1)
    positions = positions.view(-1, 1, chunks, size)
    place = torch.arange(size, device=q.device)
    back = place[:, None] - place
    shares = (positions.unsqueeze(-1) >= back) & (back >= 0)  # token j is of the same document as i, and not after it
    # Sums from j to i, because the rounding of differences of sums would depend on other documents. They are matrix
    # products, because torch's cumsum has no fixed order on GPUs.
    upto = torch.ones(size, size, dtype=q.dtype, device=q.device).triu()
    sums = decay.mT.expand(*decay.shape[:-1], size).triu(1) @ upto
    between = sums.mT.masked_fill(~shares, -torch.inf).exp()
    # The factor by which S before the chunk has decayed at each token of the chunk.
    entering = ((decay.squeeze(-1) @ upto).exp() * (positions > place)).unsqueeze(-1)
    weighted = k * beta
    of_values, of_states = torch.linalg.solve_triangular(
        weighted @ k.mT * between,
        torch.cat((v * beta, weighted * entering), dim=-1),
        upper=False,
        unitriangular=True,
    ).chunk(2, dim=-1)
    scores, reads = q @ k.mT * between, q * entering
    writes, leaving = (k * between[..., -1, :].unsqueeze(-1)).mT, entering[..., -1:, :]
    # A chunk maps S to `kept` S + `added`; only this map is applied chunk by chunk.
    kept = leaving * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - writes @ of_states
    states = _States.apply(kept.flatten(0, 1), (writes @ of_values).flatten(0, 1), state.flatten(0, 1))
    before = states[:-1].transpose(0, 1).view_as(kept)
    out = (reads - scores @ of_states) @ before + scores @ of_values
    return out.flatten(2, 3)[:, :, :length].permute(2, 0, 1, 3), states[-1].view_as(state)


class _States(torch.autograd.Function):
    """From `kept` and `added` [N, chunks, d, d] and the first state [N, d, d], the states before each chunk and after
    the last, [chunks + 1, N, d, d]. One kernel for each chunk in forward, and one in backward."""

    @staticmethod
    def forward(ctx: Any, kept: Tensor, added: Tensor, state: Tensor) -> Tensor:
        states = torch.cat((state.unsqueeze(0), added.transpose(0, 1)))
        for chunk, keeps in enumerate(kept.unbind(1)):
            states[chunk + 1].baddbmm_(keeps, states[chunk])
        ctx.save_for_backward(kept, states)
        return states

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        kept, states = ctx.saved_tensors
        grad = grads[0].clone()
        for chunk, keeps in reversed(list(enumerate(kept.mT.unbind(1)))):
            grad[chunk].baddbmm_(keeps, grad[chunk + 1])
        of_added = grad[1:]
        return (of_added @ states[:-1].mT).transpose(0, 1), of_added.transpose(0, 1), grad[0]


def _in_chunks(x: Tensor) -> Tensor:
    """[t, b, n, w] -> [b, n, chunks, CHUNK, w]; padding tokens are zeros, which change no state."""
    whole = -(-len(x) // CHUNK) * CHUNK
    padded = F.pad(x.permute(1, 2, 0, 3), (0, 0, 0, whole - len(x)))
    return padded.unflatten(2, (-1, CHUNK))

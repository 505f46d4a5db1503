"""The gated delta net (Yang et al., "Gated Delta Networks", 2024; Qwen3-Next): a short convolution over the channels of
q, k and v, and a rule by which each head carries a matrix S from token to token:

    S_i = exp(g_i) S_{i-1} + beta_i k_i (v_i - (exp(g_i) S_{i-1})^T k_i)^T        out_i = S_i^T q_i / sqrt(d)

It is computed in chunks: inside of one by a triangular system of its tokens (the paper, section 3.2), and from one to
the next through S. What crosses from a range of tokens to the next is a `carry`: S, and the last tokens before the
convolution. A document begins with S = 0 and nothing to convolve with.

Legend: t tokens, b batch, n value heads, m key heads, each of which serves n / m value heads in turn, d head dim,
C = (2 m + n) d channels. `mixed` [t, b, C + 2 n] has q, k and v of a token, and then the logits of beta and those of
the decay of each value head; positions [b, t] count the tokens of its document before each one. The rule is computed in
the wide dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memo.spec.delta import CHUNK, TAPS, carry_size, group_tokens
from memo_kernels import wide_dtype

_EPSILON = 1e-6
"""In the norms of q and k."""


class DeltaNet(NamedTuple):
    """The parameters of some heads, in the order of `mixed`: kernels [C, TAPS], and for each value head the logarithm
    of the rate of its decay and a bias [n]."""

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
        """That of the beginning of a sequence: [b, elements], in the wide dtype."""
        size = carry_size(self.heads, self.key_heads, self.head_dim)
        return mixed.new_zeros((mixed.shape[1], size), dtype=wide_dtype(mixed.dtype))


def forward(net: DeltaNet, mixed: Tensor, carry: Tensor, positions: Tensor, out: Tensor) -> Tensor:
    """Writes `out` [t, b, n d], and returns the carry after these tokens."""
    for rows in _groups(net, mixed):
        out[rows], carry = _run(net, mixed[rows], carry, positions[:, rows])
    return carry


def backward(
    net: DeltaNet, grad_out: Tensor, mixed: Tensor, carry: Tensor, positions: Tensor, grad_carry: Tensor, grad: Tensor
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The gradient of `carry`, and the sums of those of kernels, rates and biases, in the wide dtype.

    Args:
        grad_carry: of the last carry.
        grad: of `mixed`, is written.
    """
    carries = [carry]
    for rows in list(_groups(net, mixed))[:-1]:
        carries.append(_run(net, mixed[rows], carries[-1], positions[:, rows])[1])
    parameters = tuple(net[:3])
    sums = tuple(torch.zeros_like(each, dtype=grad_carry.dtype) for each in parameters)
    for rows in reversed(list(_groups(net, mixed))):
        given = (mixed[rows], carries.pop(), *parameters)
        grad[rows], grad_carry, *found = _run_backward(net, given, positions[:, rows], (grad_out[rows], grad_carry))
        for total, part in zip(sums, found, strict=True):
            total.add_(part)
    return grad_carry, sums


def _run_backward(
    net: DeltaNet, given: tuple[Tensor, ...], positions: Tensor, grads: tuple[Tensor, Tensor]
) -> tuple[Tensor, ...]:
    """Of one group: the gradients of what `_run` is given, and of the parameters, from those of what it gives."""
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in given]
        own = net._replace(kernels=inputs[2], rates=inputs[3], biases=inputs[4])
        outputs = _run(own, inputs[0], inputs[1], positions)
    return torch.autograd.grad(outputs, inputs, grads)


def _groups(net: DeltaNet, mixed: Tensor) -> Iterator[slice]:
    """The rows that are computed at a time."""
    rows = group_tokens(net.heads, mixed.shape[1])
    return (slice(start, min(start + rows, len(mixed))) for start in range(0, len(mixed), rows))


def _run(net: DeltaNet, mixed: Tensor, carry: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """One group: out [t, b, n d] in the dtype of `mixed`, and the carry after it."""
    batch, heads, d, channels = mixed.shape[1], net.heads, net.head_dim, len(net.kernels)
    last, state = carry.split([(TAPS - 1) * channels, heads * d * d], dim=1)
    x, of_beta, of_decay = mixed.split([channels, heads, heads], dim=-1)
    met = torch.cat((last.view(batch, TAPS - 1, channels).transpose(0, 1), x.to(carry.dtype)))
    mixed_in = F.silu(_convolved(met, net.kernels.to(carry.dtype), positions).to(mixed.dtype)).to(carry.dtype)
    parts = mixed_in.unflatten(-1, (-1, d)).split([net.key_heads, net.key_heads, heads], dim=2)
    q, k = (_normed(part).repeat_interleave(heads // net.key_heads, dim=2) for part in parts[:2])
    rate, bias = net.rates.to(carry.dtype).exp(), net.biases.to(carry.dtype)
    decay = -rate * F.softplus(of_decay.to(carry.dtype) + bias)
    beta = of_beta.sigmoid().to(carry.dtype)
    out, state = _rule(q * d**-0.5, k, parts[2], beta, decay, positions, state.view(batch, heads, d, d))
    carry = torch.cat((met[-(TAPS - 1) :].transpose(0, 1).flatten(1), state.flatten(1)), dim=1)
    return out.flatten(2).to(mixed.dtype), carry


def _convolved(x: Tensor, kernels: Tensor, positions: Tensor) -> Tensor:
    """[t, b, C] of x [TAPS - 1 + t, b, C]: each token and those just before it, as far as its document has them."""
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
    """q, k, v [t, b, n, d], beta and decay [t, b, n], the logarithm of a factor; state [b, n, d, d] -> out [t, b, n, d]
    and the state after them."""
    length = len(q)
    q, k, v, beta, decay = (_in_chunks(x) for x in (q, k, v, beta.unsqueeze(-1), decay.unsqueeze(-1)))
    size, chunks = q.shape[-2], q.shape[2]
    past = chunks * size - length
    positions = torch.cat((positions, positions[:, -1:] + torch.arange(1, past + 1, device=q.device)), dim=1)
    positions = positions.view(-1, 1, chunks, size)
    place = torch.arange(size, device=q.device)
    back = place[:, None] - place
    shares = (positions.unsqueeze(-1) >= back) & (back >= 0)  # token j is of the same document as i, and not after it
    # Sums from j to i, not differences of sums, whose rounding would depend on other documents; as products, because
    # torch's cumsum has no fixed order on GPUs.
    upto = torch.ones(size, size, dtype=q.dtype, device=q.device).triu()
    sums = decay.mT.expand(*decay.shape[:-1], size).triu(1) @ upto
    between = sums.mT.masked_fill(~shares, -torch.inf).exp()
    # What is left of S before the chunk at each of its tokens.
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
    # A chunk takes S to `kept` S + `added`: all that is left to do chunk by chunk.
    kept = leaving * torch.eye(q.shape[-1], dtype=q.dtype, device=q.device) - writes @ of_states
    states = _States.apply(kept.flatten(0, 1), (writes @ of_values).flatten(0, 1), state.flatten(0, 1))
    before = states[:-1].transpose(0, 1).view_as(kept)
    out = (reads - scores @ of_states) @ before + scores @ of_values
    return out.flatten(2, 3)[:, :, :length].permute(2, 0, 1, 3), states[-1].view_as(state)


class _States(torch.autograd.Function):
    """The states before each chunk and after the last, [chunks + 1, N, d, d], of `kept` and `added` [N, chunks, d, d]
    and the first state [N, d, d]: one kernel a chunk, and in backward one more."""

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
    """[t, b, n, w] -> [b, n, chunks, CHUNK, w]; tokens past the end are zeros, which change no state."""
    whole = -(-len(x) // CHUNK) * CHUNK
    padded = F.pad(x.permute(1, 2, 0, 3), (0, 0, 0, whole - len(x)))
    return padded.unflatten(2, (-1, CHUNK))

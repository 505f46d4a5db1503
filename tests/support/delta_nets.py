"""Gated delta nets for tests: token by token by the paper's equations, and memo's own over ranges of tokens."""

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from memo.attention import delta_rule
from memo.attention.delta_rule import DeltaNet, Gradients, Place

TOKENS, BATCH, HEADS, KEY_HEADS, DIM = 150, 2, 4, 2, 16
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
DOCUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((150,), (150,)),
    "several": ((70, 1, 79), (130, 20)),
    "at the ends of chunks": ((64, 64, 22), (63, 1, 1, 85)),
}


def net(kind: type[DeltaNet] = DeltaNet) -> DeltaNet:
    torch.manual_seed(1)
    kernels, rates = torch.randn(CHANNELS, 4, dtype=torch.float64) / 2, torch.randn(HEADS, dtype=torch.float64)
    return kind(kernels, rates, torch.ones_like(rates), DIM)


def positions(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def place(lengths: tuple[tuple[int, ...], ...]) -> Place:
    return Place(tuple(tuple(accumulate(row, initial=0)) for row in lengths), 0)


def token_by_token(of: DeltaNet, mixed: Tensor, places: Tensor) -> Tensor:
    """Compute the paper's equations, one token after another."""
    x, beta, decay = mixed.split([CHANNELS, HEADS, HEADS], dim=-1)
    beta, decay = beta.sigmoid(), (-of.rates.exp() * F.softplus(decay + of.biases)).exp()
    state, outs = x.new_zeros(BATCH, HEADS, DIM, DIM), []
    for i in range(TOKENS):
        met = [
            x[i - back] * of.kernels[:, 3 - back] * (places[:, i] >= back).unsqueeze(-1)
            for back in range(min(i + 1, 4))
        ]
        heads = F.silu(torch.stack(met).sum(0)).view(BATCH, -1, DIM)
        q, k, v = heads.split([KEY_HEADS, KEY_HEADS, HEADS], dim=1)
        q, k = (
            (each / (each.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(HEADS // KEY_HEADS, dim=1)
            for each in (q, k)
        )
        state = state * (places[:, i] > 0).view(-1, 1, 1, 1) * decay[i][..., None, None]
        new = beta[i].unsqueeze(-1) * (v - (state * k.unsqueeze(-1)).sum(-2))
        state = state + k.unsqueeze(-1) * new.unsqueeze(-2)
        outs.append((state * q.unsqueeze(-1)).sum(-2) / DIM**0.5)
    return torch.stack(outs).flatten(2)


class Expected(NamedTuple):
    """Of a net's input with documents: what token by token gives, and the gradients of a gradient of it."""

    mixed: Tensor
    grad_out: Tensor
    out: Tensor
    gradients: tuple[Tensor, ...]
    """Of the input, the kernels, the rates and the biases."""

    def is_found(self, out: Tensor, gradients: Gradients, bound: float) -> bool:
        pairs = [(out, self.out), *zip((gradients.mixed, *gradients[2:]), self.gradients, strict=True)]
        return all(error(*pair) <= bound for pair in pairs)


@cache
def expected(documents: str) -> Expected:
    """Computed once in a process, whatever chunks are compared with it."""
    of = net()
    mixed = torch.randn(TOKENS, BATCH, CHANNELS + 2 * HEADS, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (mixed, *of[:3])]
    out = token_by_token(DeltaNet(*leaves[1:], DIM), leaves[0], positions(DOCUMENTS[documents]))
    grad_out = torch.randn_like(out)
    return Expected(mixed, grad_out, out.detach(), torch.autograd.grad(out, leaves, grad_out))


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def run(of: DeltaNet, mixed: Tensor, place: Place, ends: Sequence[int], grad_out: Tensor) -> tuple[Tensor, Gradients]:
    """Run forward and backward of ranges that end at `ends`; each range goes on from the carry of the previous one."""
    ranges = [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]
    out, carries = torch.empty_like(grad_out), [of.empty_carry(mixed)]
    for rows in ranges:
        carries.append(torch.empty_like(carries[-1]))
        delta_rule.forward(of, mixed[rows], carries[-2], place._replace(start=rows.start), out[rows], carries[-1])
    wide = carries[0].dtype
    found = Gradients(torch.empty_like(mixed), *(torch.zeros_like(x, dtype=wide) for x in (carries[0], *of[:3])))
    for rows, carry in zip(reversed(ranges), reversed(carries[:-1]), strict=True):
        own = found._replace(mixed=found.mixed[rows])
        delta_rule.backward(of, grad_out[rows], mixed[rows], carry, place._replace(start=rows.start), own)
    return out, found

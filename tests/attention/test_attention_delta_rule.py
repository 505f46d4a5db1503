"""The gated delta net in chunks, against one token after the other, in fp64: outputs and all gradients to 1e-13 of the
largest; with documents that end anywhere, in any number of groups and of ranges that carry on from each other."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from memo.attention import delta_rule
from memo.attention.delta_rule import DeltaNet, Gradients, Place

TOKENS, BATCH, HEADS, KEY_HEADS, DIM = 150, 2, 4, 2, 16
CHANNELS = (2 * KEY_HEADS + HEADS) * DIM
BOUND = 1e-13
DOCUMENTS: dict[str, tuple[tuple[int, ...], ...]] = {
    "one": ((150,), (150,)),
    "several": ((70, 1, 79), (130, 20)),
    "at the ends of chunks": ((64, 64, 22), (63, 1, 1, 85)),
}


def net() -> DeltaNet:
    torch.manual_seed(1)
    kernels, rates = torch.randn(CHANNELS, 4, dtype=torch.float64) / 2, torch.randn(HEADS, dtype=torch.float64)
    return DeltaNet(kernels, rates, torch.ones_like(rates), DIM)


def positions(lengths: tuple[tuple[int, ...], ...]) -> Tensor:
    return torch.stack([torch.cat([torch.arange(length) for length in row]) for row in lengths])


def place(lengths: tuple[tuple[int, ...], ...], start: int = 0) -> Place:
    return Place(tuple(tuple(accumulate(row, initial=0)) for row in lengths), start)


def token_by_token(of: DeltaNet, mixed: Tensor, places: Tensor) -> Tensor:
    """The paper's equations, as they stand."""
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


def error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("group", [128, 512])
@pytest.mark.parametrize("ends", [(150,), (40, 150), (64, 128, 150)], ids=str)
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_chunks_compute_what_tokens_one_after_the_other_do(
    documents: str, ends: tuple[int, ...], group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_rule, "group_tokens", lambda heads, batch: group)
    of, lengths = net(), DOCUMENTS[documents]
    mixed = torch.randn(TOKENS, BATCH, CHANNELS + 2 * HEADS, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (mixed, *of[:3])]
    expected = token_by_token(DeltaNet(*leaves[1:], DIM), leaves[0], positions(lengths))
    grad_out = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, grad_out)

    ranges = [slice(start, end) for start, end in zip((0, *ends), ends, strict=False)]
    out, carries = torch.empty_like(expected), [of.empty_carry(mixed)]
    for rows in ranges:
        carries.append(torch.empty_like(carries[-1]))
        delta_rule.forward(of, mixed[rows], carries[-2], place(lengths, rows.start), out[rows], carries[-1])
    assert error(out, expected.detach()) <= BOUND
    found = Gradients(*(torch.zeros_like(x) for x in (mixed, carries[-1], *of[:3])))
    for rows, carry in zip(reversed(ranges), reversed(carries[:-1]), strict=True):
        own = found._replace(mixed=found.mixed[rows])
        delta_rule.backward(of, grad_out[rows], mixed[rows], carry, place(lengths, rows.start), own)
    for gradient, wanted in zip((found.mixed, *found[2:]), gradients, strict=True):
        assert error(gradient, wanted) <= BOUND


def test_other_documents_change_no_bit() -> None:
    """Outputs and gradients of a document, in bf16, where the tokens of the one before are others."""
    of = DeltaNet(*(x.bfloat16() for x in net()[:3]), DIM)
    places, own = place(((70, 80), (70, 80))), slice(70, None)
    mixed = torch.randn(TOKENS, BATCH, CHANNELS + 2 * HEADS).bfloat16()
    grad_out = torch.randn(TOKENS, BATCH, HEADS * DIM).bfloat16()
    grad_out[:70] = 0
    found = []
    for given in (mixed, torch.cat((-3 * mixed[:70], mixed[70:]))):
        out, carry = torch.empty_like(grad_out), of.empty_carry(mixed)
        gradients = Gradients(*(torch.zeros_like(x) for x in (mixed, carry, *of[:3])))
        delta_rule.forward(of, given, carry, places, out, torch.empty_like(carry))
        delta_rule.backward(of, grad_out, given, carry, places, gradients)
        found.append((out[own], gradients.mixed[own], *gradients[2:]))
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))

"""What a token may depend on: earlier tokens of its own document, and nothing else.

Of other documents tests/distributed/test_packed_documents.py has more.
"""

import functools
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from forward import Result, run_once
from layouts import tiny
from torch import Tensor

from memo.model.transformer import Microbatch

torch.set_num_threads(1)

S, B, VOCAB = 64, 2, 61
DOCUMENTS = ((0, 13, 14, 40, 64), (0, 31, 64))  # one of a single token
MODELS = ("gpt-tiny", "gpt2-tiny", "llama-tiny", "qwen3-tiny")


def make_batch(documents: tuple[tuple[int, ...], ...] | None) -> Microbatch:
    """Random tokens, labels and loss weights; positions start anew in each document."""
    generator = torch.Generator().manual_seed(2)
    tokens, labels = torch.randint(0, VOCAB, (2, S, B), generator=generator)
    weight = torch.rand(S, B, generator=generator, dtype=torch.float64)
    rows = [
        torch.cat([torch.arange(stop - start) for start, stop in pairwise(row)]) for row in documents or ((0, S),) * B
    ]
    positions = torch.stack(rows, dim=1)
    return Microbatch(tokens, labels, positions, weight, positions, documents)


def run(model: str, batch: Microbatch) -> Result:
    """In fp64, with a position table of S rows whatever the length of the batch."""
    seq_length, rows = batch.tokens.shape
    config = tiny(
        model,
        max_position_embeddings=S,
        init_method_std=0.3,  # so large that attention is far from uniform
        seq_length=seq_length,
        micro_batch_size=rows,
        global_batch_size=rows,
    )
    return run_once(config, batch)


@functools.cache
def run_whole(model: str, *, packed: bool) -> Result:
    return run(model, make_batch(DOCUMENTS if packed else None))


def cut(batch: Microbatch, row: int, start: int, stop: int) -> Microbatch:
    """One document as a batch of its own."""
    tokens, labels, positions, weight = (
        x[start:stop, row : row + 1].contiguous()
        for x in (batch.tokens, batch.labels, batch.positions, batch.loss_weight)
    )
    return Microbatch(tokens, labels, positions, weight, positions, None)


@pytest.mark.parametrize("model", MODELS)
def test_packed_sample_equals_its_documents_alone(model: str) -> None:
    """fp64, 1e-12: the loss of every token, the weighted sum, and the sum of the documents' gradients."""
    packed, batch = run_whole(model, packed=True), make_batch(DOCUMENTS)
    losses, total = torch.empty(S, B, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    gradients: dict[str, Tensor] = {}
    for row, ends in enumerate(DOCUMENTS):
        for start, stop in pairwise(ends):
            alone = run(model, cut(batch, row, start, stop))
            losses[start:stop, row] = alone.losses[:, 0]
            total = total + alone.loss
            for name, gradient in alone.gradients.items():
                gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
    torch.testing.assert_close(packed.losses, losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(packed.loss, total, rtol=1e-12, atol=1e-12)
    assert packed.gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(packed.gradients[name], gradient, rtol=1e-12, atol=1e-12)
    together = run_whole(model, packed=False)
    assert (together.losses - losses).abs().max() > 1e-3, "the borders changed nothing"


def changed(model: str, token: int, row: int) -> Tensor:
    """Which losses [s, b] differ when one token is another; the labels stay."""
    batch = make_batch(None)
    tokens = batch.tokens.clone()
    tokens[token, row] = (tokens[token, row] + 1) % VOCAB
    after = run(model, replace(batch, tokens=tokens)).losses
    return (after - run_whole(model, packed=False).losses).abs() > 1e-12


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("token", [0, 1, 29, S - 1])
def test_a_token_changes_its_own_loss_and_later_ones_alone(model: str, token: int) -> None:
    """fp64, 1e-12; the other row of the batch does not change either."""
    expected = torch.zeros(S, B, dtype=torch.bool)
    expected[token:, 1] = True
    assert torch.equal(changed(model, token, row=1), expected)

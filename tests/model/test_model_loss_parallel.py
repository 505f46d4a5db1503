"""Norm and vocabulary-parallel linear cross-entropy equal the unsharded loss: values, d hidden, d weights.

Legend: s tokens, b batch, h hidden; n = s / tp tokens and v_local rows of the vocabulary on each rank.
"""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from memo.model.norm import Norm
from memo.parallel.collectives import all_gather
from memo.parallel.loss import LossSettings, linear_cross_entropy, token_losses
from memo.parallel.shards import sharded_parameter
from memo.spec.weights import one
from memo_kernels import select_ops

torch.set_num_threads(1)

S, B, H = 16, 2, 8
EPSILON = 1e-5
CHUNK_SIZES = (1, 7, 16, 1000)


def make_inputs(vocab: int) -> list[Tensor]:
    """hidden [s, b, h], weight [vocab, h], labels [s, b] in every slice, weights [s, b] of the losses, weight and bias
    [h] of the norm."""
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(S, B, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, H, generator=generator, dtype=torch.float64)
    labels = torch.linspace(0, vocab - 1, S * B).long()[torch.randperm(S * B, generator=generator)]
    edges = torch.tensor([0, 63, 64, 127, 128, 191, 192, vocab - 1])
    labels[: len(edges)] = edges.clamp_max(vocab - 1)  # both sides of every border between ranks
    weights = torch.rand(S, B, generator=generator, dtype=torch.float64)
    weights[4:8] = 0.0  # whole chunks without answers
    of_norm = torch.randn(2, H, generator=generator, dtype=torch.float64)
    return [hidden, weight, labels.view(S, B), weights, *of_norm]


def on_rank(inputs: list[Tensor], chunk_size: int) -> list[Tensor]:
    """losses [s, b], their weighted sum, d hidden [n, b, h], d weight [v_local, h], d norm's weight and bias [h], of
    this rank."""
    hidden, weight, labels, weights, *of_norm = inputs
    group, tp, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    head = sharded_parameter(one("head.weight", weight.shape[0], H, "vocabulary"), torch.float64, group, std=0.0)
    local_weight = torch.full(head.shape, 100.0, dtype=torch.float64)  # what padding holds must not matter
    for piece in head.shard.pieces:
        piece.of_local(local_weight).copy_(piece.of_global(weight))
    local_hidden = hidden.chunk(tp)[rank].clone()
    leaves = (local_hidden.requires_grad_(), local_weight.requires_grad_())
    norm = Norm(*(nn.Parameter(x) for x in of_norm), EPSILON, select_ops("torch", torch.float64))
    sizes = {"vocab_size": weight.shape[0], "chunk_size": chunk_size}
    settings = LossSettings(norm, group=group, **sizes)
    losses = token_losses(*leaves, labels, settings)
    loss = linear_cross_entropy(*leaves, labels, settings, weights)
    gradients = torch.autograd.grad(loss, (*leaves, *norm.parameters()))
    return [losses, loss.detach(), *gradients]


def on_rank_all_chunks(inputs: list[Tensor]) -> list[list[Tensor]]:
    return [on_rank(inputs, chunk_size) for chunk_size in CHUNK_SIZES]


def gathered_tokens(chunk_size: int) -> list[int]:
    """How many tokens each all-gather of the losses' forward, and of backward, brings together."""
    numbers = []

    def counting(x: Tensor, group: ProcessGroup | None) -> Tensor:
        whole = all_gather(x, group)
        numbers.append(whole.shape[0] * whole.shape[1])
        return whole

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("memo.parallel.loss.all_gather", counting)
        on_rank(make_inputs(100), chunk_size)
    return numbers


@pytest.mark.parametrize(("chunk_size", "chunks"), [(16, [16, 16]), (24, [24, 8]), (1, [4] * 8)])
def test_chunks_are_counted_in_tokens_of_all_ranks(chunk_size: int, chunks: list[int]) -> None:
    """32 tokens in all. A chunk's logits grow with what is gathered, not with what one rank sends; a chunk is at least
    one row of each rank, here 2 x 2 tokens."""
    assert run_ranks(2, gathered_tokens, chunk_size) == [2 * chunks] * 2  # forward and backward


@pytest.mark.parametrize(
    ("tp", "vocab", "real_rows"),
    [(2, 100, [64, 36]), (2, 61, [61, 0]), (4, 200, [64, 64, 64, 8]), (4, 100, [64, 36, 0, 0])],
)
def test_equals_unsharded(tp: int, vocab: int, real_rows: list[int]) -> None:
    """fp64, 1e-12; every rank has the same losses to the last bit; padding rows get no gradient at all."""
    inputs = make_inputs(vocab)
    leaves = hidden, weight, *of_norm = [x.clone().requires_grad_() for x in (*inputs[:2], *inputs[4:])]
    logits = F.linear(F.layer_norm(hidden, (H,), *of_norm, EPSILON), weight)
    true = F.cross_entropy(logits.flatten(0, 1), inputs[2].flatten(), reduction="none").view(S, B)
    grad_hidden, grad_weight, *grads_of_norm = torch.autograd.grad((true * inputs[3]).sum(), leaves)
    for results in zip(*run_ranks(tp, on_rank_all_chunks, inputs), strict=True):  # of one chunk size
        losses, sums, grads_hidden, grads_weight, *parts_of_norm = zip(*results, strict=True)
        assert all(torch.equal(other, first[0]) for first in (losses, sums) for other in first)
        torch.testing.assert_close(losses[0], true.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(sums[0], (true * inputs[3]).sum().detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(torch.cat(grads_hidden), grad_hidden, rtol=1e-12, atol=1e-12)
        real = [grad[:rows] for grad, rows in zip(grads_weight, real_rows, strict=True)]
        padding = [grad[rows:] for grad, rows in zip(grads_weight, real_rows, strict=True)]
        torch.testing.assert_close(torch.cat(real), grad_weight, rtol=1e-12, atol=1e-12)
        assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in padding)
        for parts, whole in zip(parts_of_norm, grads_of_norm, strict=True):
            torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=1e-12)

"""A loss that counts answers alone: the same in every layout, and PyTorch's cross entropy with ignore_index.

fp64. Every answer token of the global batch weighs the same, wherever it is computed: samples have from none to all of
their labels masked, so ranks, microbatches and halves of a sequence hold very different numbers of them.

Bound: 1e-12 of the largest value for losses and gradients, a few hundred roundings of 1e-16.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from answers import Answers
from forward import run_once
from layouts import Outcome, assemble, global_pieces, one_step_backward, relative_error, tiny
from ranks import run_ranks
from torch import Tensor

from memo.config import RunConfig
from memo.data import GlobalBatchSampler
from memo.parallel.collectives import all_reduce
from memo.train.build import build, build_mesh
from memo.train.feed import Feed

BOUND = 1e-12
IGNORE = -100


def first_step(config: RunConfig, world_size: int) -> tuple[Outcome, float]:
    """Loss and gradients of this rank, and the weights of all its tokens, counted once."""
    mesh = build_mesh(config, dist.get_rank(), world_size)
    model = build(config, mesh, torch.float64, torch.device("cpu"))
    data = Answers(config.model.vocabulary, config.data.seq_length)
    sampler = GlobalBatchSampler(config.training.global_batch_size or 1, seed=7)
    tiles = model.tiles
    feed = Feed(data, sampler, mesh, config, torch.device("cpu"), tiles)
    weights = sum(float(batch.loss_weight.sum()) for batch in feed.peek())
    loss = one_step_backward(model, feed)
    counted = weights if mesh.at.tp == 0 and mesh.at.pp == 0 else 0.0
    total = float(all_reduce(torch.tensor(counted, dtype=torch.float64), mesh.world))
    return Outcome(losses=[loss], gradients=global_pieces(model, "grad")), total


def run(config: RunConfig, world_size: int) -> Outcome:
    parts = run_ranks(world_size, first_step, config, world_size)
    assert all(abs(total - 1.0) < 1e-14 for _, total in parts)  # each answer token of the batch once
    outcomes = [outcome for outcome, _ in parts]
    return Outcome([sum(o.losses[0] for o in outcomes)], gradients=assemble([o.gradients for o in outcomes]))


@functools.cache
def one_process(model: str) -> Outcome:
    return run(tiny(model, num_layers=4, global_batch_size=8, micro_batch_size=8), 1)


@pytest.mark.parametrize(
    ("model", "world_size", "layout"),
    [
        ("gpt-tiny", 1, {"micro_batch_size": 1}),
        ("llama-tiny", 2, {"cp": 2, "cp_comm_type": "a2a", "micro_batch_size": 2}),
        ("llama-tiny", 4, {"micro_batch_size": 2}),
        ("llama-tiny", 4, {"tp": 2, "cp": 2, "offload_alpha": 0.5, "offload_tiles": 2}),
        ("llama-tiny", 4, {"pp": 2, "offload_alpha": 0.5, "offload_tiles": 2}),
        pytest.param("llama-tiny", 8, {"tp": 2, "cp": 2, "pp": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_layouts_agree(model: str, world_size: int, layout: dict[str, object]) -> None:
    expected = one_process(model)
    actual = run(tiny(model, num_layers=4, global_batch_size=8, **layout), world_size)
    assert abs(actual.losses[0] - expected.losses[0]) <= BOUND * expected.losses[0]
    assert relative_error(actual.gradients, expected.gradients) <= BOUND


def labels_of(feed_labels: Tensor, loss_weight: Tensor) -> Tensor:
    """With IGNORE where nothing counts."""
    return feed_labels.long().masked_fill(loss_weight == 0, IGNORE)


def test_model_loss_is_cross_entropy_with_ignore_index() -> None:
    """The loss of a whole microbatch from its logits, as anyone would write it."""
    config = tiny("llama-tiny", global_batch_size=4, micro_batch_size=4)
    mesh = build_mesh(config, 0, 1)
    data = Answers(config.model.vocabulary, config.data.seq_length)
    feed = Feed(data, GlobalBatchSampler(4, seed=7), mesh, config, torch.device("cpu"))
    (batch,) = feed.next_global_batch()
    result = run_once(config, batch)
    labels = labels_of(batch.labels, batch.loss_weight)
    assert 0 < int((labels != IGNORE).sum()) < labels.numel()
    expected = F.cross_entropy(result.logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
    torch.testing.assert_close(result.loss, expected, rtol=BOUND, atol=0)


def test_a_batch_without_answers_teaches_nothing() -> None:
    """No division by zero: the loss is 0 and weights are finite."""
    config = tiny("gpt-tiny", global_batch_size=1)
    feed = Feed(
        Answers(config.model.vocabulary, config.data.seq_length),
        GlobalBatchSampler(1, seed=7),  # sample 0 has no answers
        build_mesh(config, 0, 1),
        config,
        torch.device("cpu"),
    )
    (batch,) = feed.next_global_batch()
    assert torch.equal(batch.loss_weight, torch.zeros_like(batch.loss_weight))
    assert float(run_once(config, batch).loss) == 0.0

"""memo's own model, loss, schedule and optimizer on planned addresses, on two ranks with their gloo threads."""

import pytest
import torch
import torch.distributed as dist
from first_fit import first_fit
from layouts import global_pieces, make, one_step_backward, tiny
from ranks import run_ranks

from memo.allocator.planned import PlannedAllocator
from memo.allocator.statistics import Statistics
from memo.config import RunConfig
from memo.data import MockDataset
from memo.train.feed import Feed

FIRST_STEPS, STEPS = 4, 6


def _train(
    config: RunConfig, is_packed: bool, is_planned: bool
) -> tuple[list[float], dict[str, torch.Tensor], Statistics]:
    allocator = PlannedAllocator.install("cpu")
    model, feed = make(config, dist.get_world_size())
    if not is_packed:
        whole = MockDataset(config.model.vocabulary, config.data.seq_length, seed=7, mean_document_length=10**9)
        feed = Feed(whole, feed.sampler, model.mesh, config, model.device)
    losses = []

    def step() -> None:
        with allocator.iteration():
            allocator.mark("forward_backward")
            losses.append(one_step_backward(model, feed))
            allocator.mark("optimizer")
            model.optimizer.step(config.training.lr)

    for _ in range(FIRST_STEPS - 1):
        step()
    with allocator.record() as recording:
        step()
    if is_planned:
        allocator.use(first_fit(recording.trace, min_bytes=4096))
        allocator.set_poison(True)
    for _ in range(STEPS):
        step()
    return losses, global_pieces(model, "master"), allocator.statistics


def _compare(config: RunConfig, world_size: int, is_packed: bool) -> list[Statistics]:
    """Losses and weights are the same to the last bit; statistics of the planned ranks."""
    passed_on = run_ranks(world_size, _train, config, is_packed, False)
    planned = run_ranks(world_size, _train, config, is_packed, True)
    for (losses, weights, _), (expected_losses, expected_weights, _) in zip(planned, passed_on, strict=True):
        assert losses == expected_losses
        for name, expected in expected_weights.items():  # NaN: another rank's
            assert torch.equal(weights[name].nan_to_num(-1.0), expected.nan_to_num(-1.0)), name
    return [statistics for _, _, statistics in planned]


def test_every_request_is_served() -> None:
    statistics = _compare(tiny("llama-tiny", "fp32"), 1, is_packed=False)[0]
    assert statistics.hits > 1000
    assert statistics.hits + statistics.native == statistics.requests
    assert statistics.unasked == 0


@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}], ids=["tp2", "pp2"])
def test_threads_of_gloo_do_no_harm(layout: dict[str, int]) -> None:
    """They ask for memory of their own and free a message's tensors when they get to it.

    So addresses may still be taken, and autograd, which adds in place only to what nobody else holds, may ask for one
    more block. None of it is wrong; how often it happens is chance.
    """
    for statistics in _compare(tiny("llama-tiny", "fp32", **layout), 2, is_packed=False):
        assert statistics.hits > 100
        assert statistics.hits + statistics.native + statistics.num_fallbacks == statistics.requests
        assert statistics.fallbacks["stream"] == 0


def test_packed_documents_ask_for_other_sizes_each_step() -> None:
    """Attention works on blocks of documents, so its requests depend on the data: they fall back, nothing breaks."""
    statistics = _compare(tiny("llama-tiny", "fp32"), 1, is_packed=True)[0]
    assert statistics.hits > 0
    assert statistics.fallbacks["size"] > 0

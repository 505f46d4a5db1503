"""Training from planned addresses: the same bits, every request at its place, and no harm when a step differs.

The allocator belongs to the process, so each test trains in processes of its own.
"""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

import memo
from memo.train.planned_memory import Transients

RUN: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "seq_length": 64,
    "global_batch_size": 4,
    "train_iters": 100,
    "lr": 1e-2,
    "peak_tflops": 1.0,
    "num_threads": 1,
    "device": "cpu",
    "progress": False,
    "mock_data": True,
    "profile_cache": "off",
    "memory_planner_min_bytes": 1024,
}


def trainer(planner: str, **overrides: Any) -> memo.Trainer:
    values = {**RUN, **overrides, "memory_planner": planner}
    if planner == "off":
        del values["memory_planner_min_bytes"]
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank}
    return memo.Trainer("llama-tiny", **values)


def transients(of: memo.Trainer) -> Transients:
    found = of.parts.transients
    assert found is not None and found.planned is not None, found and found.reason
    assert found.allocator is not None
    found.allocator.set_poison(True)  # whoever reads a block after its end reads NaN
    return found


def train_on_rank(planner: str, steps: int, **overrides: Any) -> tuple[list[float], Any]:
    with trainer(planner, **overrides) as training:
        statistics = None
        if planner != "off":
            transients(training)
        losses = [training.step().lm_loss for _ in range(steps)]
        if planner != "off":
            assert training.parts.transients is not None
            statistics = training.parts.transients.statistics()
        return losses, statistics


def train_twice(world_size: int, steps: int, **overrides: Any) -> tuple[list[Any], list[float]]:
    """Statistics of every rank; asserts that the plan changes no bit of any loss."""
    plain = run_ranks(world_size, train_on_rank, "off", steps, **overrides)
    planned = run_ranks(world_size, train_on_rank, "auto", steps, **overrides)
    assert [losses for losses, _ in planned] == [losses for losses, _ in plain]
    return [statistics for _, statistics in planned], plain[0][0]


@pytest.mark.parametrize("alpha", ["off", 0.5])
def test_fifty_steps_are_served_as_planned(alpha: Any) -> None:
    """dtype fp32; bound: equal bits. Every byte of the arena is used, and none beyond."""
    (found,), losses = train_twice(1, 50, plan=alpha)
    assert losses[-1] < losses[0]
    assert found.requests == found.hits > 50 * 100
    assert (found.num_fallbacks, found.unasked, found.live_blocks) == (0, 0, 0)
    assert found.peak_bytes == found.arena_bytes > 0


@pytest.mark.parametrize(
    "layout",
    [{"tp": 2}, {"pp": 2}, {"pp": 2, "num_layers": 4, "vpp": 2}, {"cp": 2, "plan": 0.5}, {}],
    ids=["tp2", "pp2", "pp2vpp2", "cp2", "dp2"],
)
def test_every_axis_trains_as_without_a_plan(layout: dict[str, Any]) -> None:
    """Messages are freed by the threads that send them, so a few requests may be served otherwise: counted."""
    for found in train_twice(2, 4, **layout)[0]:
        assert found.hits >= 0.9 * (found.requests - found.native) > 0
        assert found.requests == found.hits + found.native + found.num_fallbacks


class Failing(nn.Module):
    """Raises in the middle of a step, once."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.failures = module, 1

    def forward(self, *args: Any) -> Any:
        if self.failures:
            self.failures -= 1
            raise RuntimeError("in the middle of a step")
        return self.module(*args)


def disturbed_on_rank(planner: str) -> tuple[list[float], int]:
    """Steps with an evaluation, an exception and a step of other data between them."""
    with trainer(planner, eval_interval=1000, plan="off") as training:
        if planner != "off":
            transients(training)
        losses = [training.step().lm_loss, training.evaluate(1)]
        layers: Any = training.parts.chunks[0].layers
        if planner == "off":
            owner, name = layers, "1"
        else:
            owner, name = layers[1], "module"  # inside of the mark, so that the phase has begun
        whole = getattr(owner, name)
        setattr(owner, name, Failing(whole))
        batches = training.feed.peek()
        with pytest.raises(RuntimeError, match="in the middle"):
            training.parts.forward_backward(batches)
        setattr(owner, name, whole)
        losses += [training.step().lm_loss for _ in range(2)]
        if planner == "off":
            return losses, 0
        assert training.parts.transients is not None
        found = training.parts.transients.statistics()
        assert found is not None and found.unasked > 0  # the step that was cut short
        assert found.outside > 0  # the evaluation
        return losses, found.num_fallbacks


def test_evaluation_and_an_exception_between_steps_do_no_harm() -> None:
    plain, planned = (run_ranks(1, disturbed_on_rank, planner)[0] for planner in ("off", "auto"))
    assert planned[0] == plain[0]
    assert planned[1] == 0


def without_a_compiler_on_rank(cache: str) -> tuple[list[float], str]:
    os.environ["XDG_CACHE_HOME"] = cache  # in this process alone
    shutil.which = lambda *_, **__: None  # type: ignore[assignment]
    with trainer("auto") as training:
        assert training.parts.transients is not None
        return [training.step().lm_loss for _ in range(2)], training.parts.transients.describe()


def test_training_goes_on_without_a_compiler_and_says_so(tmp_path: Path) -> None:
    plain = run_ranks(1, train_on_rank, "off", 2)[0][0]
    losses, said = run_ranks(1, without_a_compiler_on_rank, str(tmp_path))[0]
    assert losses == plain
    assert "not planned, torch's own allocator serves it" in said and "compiler" in said

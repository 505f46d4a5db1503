"""Steps in the same buffers: every loss and the final weights are those of alpha = 0, to the last bit.

On one process and in a pipeline, with copies when they are issued and in threads, and with evaluations between the
steps, which touch no buffer.
"""

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from layouts import tiny
from ranks import run_ranks
from swapped_steps import Workplace, observed, profiled_once
from torch import Tensor

import memo
from memo.config import RunConfig
from memo.executor.runtime import SwapRuntime
from memo.train.build import ParallelModel
from memo.train.trainer import Trainer

TILES = 4
SWAPS: dict[str, Any] = {"offload_tiles": TILES}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "seq_length": 32, "params_dtype": "fp32"}
OTHERS = [(0.0, "threads"), (0.25, "virtual"), (0.25, "threads"), (1.0, "virtual"), (1.0, "threads")]
"""What is compared with alpha = 0 and copies when they are issued."""

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass
class Run:
    losses: list[Tensor] = field(default_factory=list)
    evaluations: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def train(workplace: Workplace, model: ParallelModel, num_steps: int, evaluates: bool = False) -> Run:
    """Whole training steps on a fresh model, each with another global batch."""
    run, feed, held_out = Run(), workplace.feed(TILES), workplace.batches()
    for _ in range(num_steps):
        run.losses.append(model.forward_backward(feed.next_global_batch()))
        model.optimizer.step(lr=1e-2)
        if evaluates:
            run.evaluations.append(model.forward(held_out))
    run.weights = {name: value.detach().clone() for name, value in model.data_parallel.parameters.items()}
    return run


def assert_same_bits(actual: Run, expected: Run) -> None:
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(actual.losses, expected.losses, strict=True))
    assert not [name for name, value in expected.weights.items() if not torch.equal(actual.weights[name], value)]


def contents(runtime: SwapRuntime) -> list[Tensor]:
    """Every byte that swapping owns, after all copies."""
    runtime.swapper.backend.synchronize()
    records = runtime.swapper.records.buffers(0)
    return [buffer.clone() for buffer in (*runtime.swapper.slots, runtime._workspace, *records)]


# One process.


@functools.cache
def steps_of(count: int, alpha: float, backend: str) -> Run:
    config = tiny("llama-tiny", **{**SMALL, **SWAPS, "num_layers": 3, "global_batch_size": 1, "num_query_groups": 1})
    workplace = Workplace(config, world_size=1)
    with profiled_once():
        model = workplace.build(offload_alpha=alpha, offload_backend=backend)
    assert model.swap is not None
    with model.swap.recorded() as recorder:
        run = train(workplace, model, count)
    num_prefetches = sum(span.row == "prefetch" for span in recorder.spans())
    assert num_prefetches == count * model.swap.plan.num_prefetches > 0
    return run


@pytest.mark.parametrize(("alpha", "backend"), OTHERS)
@pytest.mark.parametrize("count", [20, pytest.param(50, marks=pytest.mark.full)])
def test_many_steps(count: int, alpha: float, backend: str) -> None:
    expected = steps_of(count, 0.0, "virtual")
    assert_same_bits(steps_of(count, alpha, backend), expected)
    assert expected.losses[-1] < expected.losses[0] - 1, "it must learn, or equal losses say little"


def make_trainer(**overrides: Any) -> Trainer:
    values: dict[str, Any] = {**SMALL, "num_layers": 3, "global_batch_size": 2, "train_iters": 5, "lr": 1e-2}
    values |= {"mock_data": True, "eval_interval": 100, "eval_iters": 2, "device": "cpu", "num_threads": 1}
    return memo.Trainer("gpt-tiny", **{**values, "peak_tflops": 1.0, "progress": False, **overrides})


def evaluate_beside_buffers(trainer: Trainer) -> float:
    runtime = trainer.parts.swap
    assert runtime is not None
    before = contents(runtime)
    with runtime.recorded() as recorder:
        loss = trainer.evaluate()
    assert all(torch.equal(now, then) for now, then in zip(contents(runtime), before, strict=True))
    assert recorder.spans() == [], "an evaluation has moved or computed something under the plan"
    return loss


def test_evaluation_is_that_of_the_plain_model() -> None:
    with observed():
        swapped = make_trainer(**SWAPS, offload_alpha=0.25)
    assert evaluate_beside_buffers(swapped) == make_trainer(offload_alpha="off").evaluate()


# A pipeline: several microbatches in flight, whose gradients add up.


def compare_in_pipeline(config: RunConfig, count: int) -> None:
    workplace = Workplace(config, world_size=2)
    with profiled_once():
        expected = train(workplace, workplace.build(offload_alpha=0.0, offload_backend="virtual"), count)
        for alpha, backend in OTHERS:
            model = workplace.build(offload_alpha=alpha, offload_backend=backend)
            assert_same_bits(train(workplace, model, count), expected)
        with observed():
            model = workplace.build(offload_alpha=0.25)
        assert model.swap is not None
        with model.swap.recorded() as recorder:
            run = train(workplace, model, count, evaluates=True)
    assert_same_bits(run, expected)
    if workplace.mesh.at.pp == 0:
        assert any(span.row == "offload" for span in recorder.spans())
    else:
        assert run.evaluations[-1] < run.evaluations[0]


@pytest.mark.parametrize("count", [4, pytest.param(10, marks=pytest.mark.full)])
def test_steps_of_a_pipeline(count: int) -> None:
    config = tiny("gpt-tiny", **{**SMALL, **SWAPS, "num_layers": 4, "global_batch_size": 3, "pp": 2})
    run_ranks(2, compare_in_pipeline, config, count)

"""The peak of a step lies between its bounds, which are close: bytes, nothing is run."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from memo.config import RunConfig
from memo.config.memory import OffloadStates
from memo.estimate.program.bounds import memory_bounds
from memo.estimate.program.memory import program_memory
from memo.search.candidates import AUTO, FULL, GRID, KEEP, SELECTIVE, Layout, batches, config_of, grids, pipelines
from memo.search.question import Question, ask
from memo.spec.slots import Moved

ZERO_3 = replace(KEEP, sharding="optim_grads_params")
LEAST_BELOW = 0.15
"""How far the lower bound may lie below the peak: stages of many chunks hold messages that it does not count."""


def layouts(question: Question) -> Iterator[Layout]:
    for grid, why in grids(question):
        if not why:
            for pipeline in pipelines(question, grid):
                yield from batches(question, pipeline)


def runs(model: str, gpus: int, seq_len: int, every: int, device: str) -> Iterator[tuple[RunConfig, Moved | None]]:
    question = ask(model, gpus, seq_len=seq_len, global_batch_size=2 * gpus)
    places: tuple[OffloadStates, ...] = ("none", "all")
    for index, layout in enumerate(list(layouts(question))[::every]):
        for strategy in (KEEP, SELECTIVE, FULL, AUTO, ZERO_3, GRID[2]):
            config = config_of(question, layout, strategy)
            config = replace(
                config,
                hardware=replace(config.hardware, device=device),
                memory=replace(config.memory, offload_states=places[index % 2]),
            )
            moved: Moved | None = None
            if strategy.swaps:
                moved = {} if isinstance(strategy.alpha, str) else strategy.alpha
            yield config, moved


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "every", "device"),
    [
        ("gpt-7b", 64, 131072, 97, "cuda"),
        ("llama-3.1-8b", 16, 262144, 17, "cuda"),
        ("gpt2-tiny", 8, 1024, 7, "cuda"),
        ("gpt-7b", 8, 8192, 11, "cpu"),
    ],
)
def test_the_peak_lies_between_its_bounds(model: str, gpus: int, seq_len: int, every: int, device: str) -> None:
    seen = 0
    for config, moved in runs(model, gpus, seq_len, every, device):
        for stage in {0, config.parallel.pp - 1}:
            peak = program_memory(config, gpus, stage, moved).total
            bounds = memory_bounds(config, gpus, stage, moved)
            assert bounds.least <= peak <= bounds.most, (config.parallel, stage)
            if device == "cuda":  # what gloo takes on a CPU is not looked at
                assert bounds.least >= (1 - LEAST_BELOW) * peak, (config.parallel, stage)
            seen += 1
    assert seen >= 60


def test_breadth_first_lies_between_its_bounds() -> None:
    question = ask("gpt-7b", 8, seq_len=8192, global_batch_size=32)
    config = config_of(question, Layout(tp=2), ZERO_3)
    config = replace(config, parallel=replace(config.parallel, gradient_accumulation_order="breadth_first"))
    bounds = memory_bounds(config, 8, 0, None)
    assert bounds.least <= program_memory(config, 8, 0).total <= bounds.most

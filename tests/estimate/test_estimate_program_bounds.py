"""The peak of a step lies between its bounds, which are close: bytes, nothing is run."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from memo.config import RunConfig
from memo.config.memory import OffloadStates
from memo.estimate.program.bounds import memory_bounds
from memo.estimate.program.memory import program_memory
from memo.estimate.program.passes import LayerPasses, _layer_passes
from memo.estimate.program.sizes import layer_sizes
from memo.estimate.program.state_layout import state_layout
from memo.estimate.program.step import Step
from memo.estimate.program.tiles import kept_values, residents
from memo.program.kinds import kind_of
from memo.search.candidates import (
    AUTO,
    FULL,
    GRID,
    KEEP,
    SELECTIVE,
    Layout,
    Strategy,
    batches,
    config_of,
    grids,
    pipelines,
)
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
            if strategy.swaps and layout.cp == 1:
                swept_config = swept(config, tiles=8 if index % 2 else 64)
                yield swept_config.override({"offload_hidden_states": index % 3 == 0}), moved


def swept(config: RunConfig, tiles: int) -> RunConfig:
    return config.override({"offload_granularity": "tile", "offload_tiles": tiles, "offload_slot_tiles": 2})


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
            bounds = memory_bounds(config, gpus, [stage], moved)[stage]
            assert bounds.least <= peak <= bounds.most, (config.parallel, stage)
            if device == "cuda":  # what gloo takes on a CPU is not looked at
                assert bounds.least >= (1 - LEAST_BELOW) * peak, (config.parallel, stage)
            seen += 1
    assert seen >= 60


@pytest.mark.parametrize("microbatches", [1, 2, 3, 64])
@pytest.mark.parametrize("strategy", [KEEP, FULL, ZERO_3, GRID[0], GRID[2]])
def test_breadth_first_lies_between_its_bounds(microbatches: int, strategy: Strategy) -> None:
    """Also with so many microbatches that their hidden states between two layers are most of a step's memory."""
    for config in breadth_first_runs(microbatches, strategy):
        peak, bounds = program_memory(config, 8, 0).total, memory_bounds(config, 8, [0], moved_of(config))[0]
        assert 0.78 * peak <= bounds.least <= peak <= bounds.most


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("microbatches", [3, 6])
@pytest.mark.parametrize("strategy", [KEEP, FULL, ZERO_3, GRID[0], GRID[2]])
def test_breadth_first_walks_through_alike_microbatches_at_once(
    microbatches: int, strategy: Strategy, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is that of walking through each of them."""
    for config in breadth_first_runs(microbatches, strategy):
        config = replace(config, hardware=replace(config.hardware, device=device))
        at_once = program_memory(config, 8, 0)
        with monkeypatch.context() as patch:
            patch.setattr(Step, "_alike_microbatches", lambda step: [1] * step.microbatches)
            each = program_memory(config, 8, 0)
        assert at_once.total == each.total
        assert at_once.components == each.components


def breadth_first_runs(microbatches: int, strategy: Strategy) -> Iterator[RunConfig]:
    """With states on the device, and in slots; on a tensor-parallel rank alone, and with data parallelism."""
    for layout in (Layout(tp=8), Layout(tp=2)):
        question = ask("gpt-7b", 8, seq_len=8192, global_batch_size=microbatches * 8 // layout.tp)
        config = config_of(question, layout, replace(strategy, order="breadth_first"))
        for places in ("none", "all"):
            yield config.override({"offload_states": places})
            if strategy.swaps:
                yield swept(config, tiles=16)


def moved_of(config: RunConfig) -> Moved | None:
    return config.memory.offload_alpha if isinstance(config.memory.offload_alpha, float) else None


@pytest.mark.parametrize("strategy", [KEEP, SELECTIVE, FULL, AUTO])
@pytest.mark.parametrize("model", ["gpt-7b", "llama-3.1-8b"])
def test_steps_of_a_ring_that_are_alike_change_no_peak(
    model: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walking through all of them finds the same: of every rank of a ring, forward and backward, and by name."""
    question = ask(model, 16, seq_len=65536)
    config = config_of(question, Layout(cp=16), strategy)
    first, kind = layer_sizes(config, 0, threads=2), kind_of(config.model)
    how = kept_values(config, {}) if strategy.swaps else residents(config)
    for device_sizes in (first, first._replace(on_cuda=False, narrow=4)):
        for rank in range(16):
            z = device_sizes._replace(ring_rank=rank)
            found = peaks(_layer_passes.__wrapped__(z, kind, how))
            with monkeypatch.context() as patch:
                patch.setattr("memo.estimate.program.attention.different_steps", lambda z: list(range(z.ring)))
                assert peaks(_layer_passes.__wrapped__(z, kind, how)) == found


def peaks(passes: LayerPasses) -> list[tuple[int, dict[str, int]]]:
    return [(one.peak.num_bytes, one.peak.alive) for one in (passes.forward, passes.backward)]


def test_no_rank_of_a_ring_and_no_stage_needs_more_than_the_account_says() -> None:
    """Ranks and stages that cannot be the worst are not walked through: the answer is that of walking through all."""
    account = ask("llama-3.1-8b", 16, seq_len=131072).account
    seen = 0
    for config, moved in runs("llama-3.1-8b", 16, 131072, 37, "cuda"):
        z = layer_sizes(config, 0, threads=1)
        for stage in {0, config.parallel.pp - 1}:
            states = state_layout(config, 16, stage)
            peaks = [Step(config, 16, stage, rank, states, moved).run().peak_bytes for rank in {0, z.ring - 1}]
            assert program_memory(config, 16, stage, moved).moment_bytes == max(peaks), (config.parallel, stage)
            seen += len(set(peaks)) > 1
        stages = [account.stage(config, stage, moved) for stage in range(config.parallel.pp)]
        assert account.worst(config, moved).total == max(rank.total for rank in stages), config.parallel
    assert seen >= 5

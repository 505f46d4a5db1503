"""The peak of a step on GPUs is that of walking through all of it: bytes, to the last; nothing is run."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from memo.config import RunConfig
from memo.config.memory import OffloadStates
from memo.estimate.memory_account import own_memories
from memo.estimate.program.memory import Program, program_memory
from memo.estimate.program.passes import LayerPasses, layer_passes
from memo.estimate.program.sizes import layer_sizes
from memo.estimate.program.step import Step
from memo.estimate.program.tiles import kept_by_layer
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

ZERO_3 = KEEP._replace(sharding="optim_grads_params")


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
    ("model", "gpus", "seq_len", "every"),
    [
        ("gpt-7b", 64, 131072, 97),
        ("llama-3.1-8b", 16, 262144, 17),
        ("gpt2-tiny", 8, 1024, 7),
        ("qwen3-30b-a3b", 8, 65536, 23),
        ("qwen3.5-4b", 8, 65536, 29),
    ],
)
def test_what_lives_at_the_worst_moment_is_the_peak_of_a_walk(model: str, gpus: int, seq_len: int, every: int) -> None:
    """Also where states are in host memory, in several chunks, and where layers are swept."""
    seen = 0
    for config, moved in runs(model, gpus, seq_len, every, "cuda"):
        program = Program(config, gpus, moved)
        for stage in {0, config.parallel.pp - 1}:
            assert program.peak_bytes(stage) == program.walk(stage).peak_bytes, (config.parallel, stage)
            seen += 1
    assert seen >= 40


@pytest.mark.parametrize("microbatches", [1, 2, 3, 64])
@pytest.mark.parametrize("strategy", [KEEP, FULL, ZERO_3, GRID[0], GRID[2]])
def test_the_same_holds_breadth_first(microbatches: int, strategy: Strategy) -> None:
    """Also with so many microbatches that their hidden states between two layers are most of a step's memory."""
    for config in breadth_first_runs(microbatches, strategy):
        program = Program(config, 8)
        assert program.peak_bytes(0) == program.walk(0).peak_bytes


@pytest.mark.parametrize(("model", "device"), [("gpt-7b", "cpu"), ("llama-3.1-8b", "cuda")])
def test_microbatches_and_layers_that_are_alike_are_walked_through_at_once(
    model: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walking through each layer of each of them finds the same peak, and the same tensors at it."""
    question, seen = ask(model, 16, seq_len=32768, global_batch_size=32), 0
    for layout in list(layouts(question))[::9]:
        for strategy in (KEEP, AUTO, ZERO_3):
            config = config_of(question, layout, strategy)
            places: OffloadStates = "optimizer" if layout.vpp > 1 else "none"
            config = config.override({"device": device, "offload_states": places, "optimizer_offload_fraction": 0.5})
            for stage in {0, config.parallel.pp - 1}:
                moved: Moved | None = {} if strategy.swaps else None
                at_once = program_memory(config, 16, stage, moved)
                with monkeypatch.context() as patch:
                    patch.setattr("memo.estimate.program.memory._walked", lambda microbatches, *_: microbatches)
                    patch.setattr(Step, "_groups", lambda step, _: [1] * step.layers)
                    each = program_memory(config, 16, stage, moved)
                assert at_once.total == each.total and at_once.components == each.components, (layout, strategy, stage)
                seen += 1
    assert seen >= 30


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
            patch.setattr(Step, "_alike_microbatches", lambda step: [1] * step.course.microbatches)
            each = program_memory(config, 8, 0)
        assert at_once.total == each.total
        assert at_once.components == each.components


def breadth_first_runs(microbatches: int, strategy: Strategy) -> Iterator[RunConfig]:
    """With states on the device, and in slots; on a tensor-parallel rank alone, and with data parallelism."""
    for layout in (Layout(tp=8), Layout(tp=2)):
        question = ask("gpt-7b", 8, seq_len=8192, global_batch_size=microbatches * 8 // layout.tp)
        config = config_of(question, layout, strategy._replace(order="breadth_first"))
        for places in ("none", "all"):
            yield config.override({"offload_states": places})
            if strategy.swaps:
                yield swept(config, tiles=16)


@pytest.mark.parametrize("strategy", [KEEP, SELECTIVE, FULL, AUTO])
@pytest.mark.parametrize("model", ["gpt-7b", "llama-3.1-8b"])
def test_steps_of_a_ring_that_are_alike_change_no_peak(
    model: str, strategy: Strategy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Walking through all of them finds the same: of every rank of a ring, forward and backward, and by name."""
    question = ask(model, 16, seq_len=65536)
    config = config_of(question, Layout(cp=16), strategy)
    first, kind = layer_sizes(config, threads=2), kind_of(config.model)
    how = kept_by_layer(config, {} if strategy.swaps else None)
    for device_sizes in (first, first._replace(on_cuda=False, narrow=4)):
        for rank in range(16):
            z = device_sizes._replace(ring_rank=rank)
            found = peaks(layer_passes.__wrapped__(z, kind, how))
            with monkeypatch.context() as patch:
                patch.setattr("memo.estimate.program.attention.different_steps", lambda z: list(range(z.ring)))
                assert peaks(layer_passes.__wrapped__(z, kind, how)) == found


def peaks(passes: LayerPasses) -> list[tuple[int, dict[str, int]]]:
    return [(one.peak.num_bytes, one.peak.alive) for one in (passes.forward, passes.backward)]


def test_no_rank_of_a_ring_and_no_stage_needs_more_than_the_account_says() -> None:
    """Stages that cannot be the worst are not counted: the answer is that of counting all."""
    account = ask("gpt-7b", 16, seq_len=131072).account
    seen = 0
    for config, moved in runs("gpt-7b", 16, 131072, 37, "cuda"):
        program = Program(config, 16, moved)
        for stage in {0, config.parallel.pp - 1}:
            peaks = [Step(program.lasting.copy(), *rank, {}).run().peak_bytes for rank in program.ranks(stage)]
            assert program.peak_bytes(stage) == max(peaks), (config.parallel, stage)
            seen += len(set(peaks)) > 1
        stages = own_memories(config, 16, range(config.parallel.pp), moved=moved, links=account.links)
        assert account.worst(config, moved).total == max(rank.total for rank in stages.values()), config.parallel
    assert seen >= 5

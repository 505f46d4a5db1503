"""--memory-planner-from training: a plan from the first steps of training, which serves all later ones.

The allocator belongs to the process, so each test trains in processes of its own.
"""

from pathlib import Path
from typing import Any

import pytest
from forward import loss_of
from packed_samples import PackedSamples
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.allocator.statistics import Statistics
from memo.artifacts.memory_plan import MemoryPlan
from memo.config import MemoryConfig
from memo.train.planned_memory import Transients

SEQ_LENGTH, VOCABULARY = SMALL_RUN["seq_length"], 257
SHORT = (5, 9, 30, 31)
PACKINGS = (SHORT, SHORT, SHORT, SHORT, SHORT, SHORT, (), (63,), (1,), (40, 50), tuple(range(1, SEQ_LENGTH)), SHORT)
"""Two samples a step: the steps that are recorded ask for less than those after them."""
FIRST_STEPS = 3
"""On a CPU: one that is not recorded, and two that are."""
STEPS = 6
PLANNED = {"memory_planner": "auto", "memory_planner_min_bytes": 256}
RUN: dict[str, Any] = {
    **SMALL_RUN,
    "model": "llama-tiny",
    "global_batch_size": 2,
    "train_iters": STEPS,
    "vocab_size": VOCABULARY,
    "params_dtype": "fp32",
    "profile_cache": "off",
    "offload_alpha": "off",
}
TILES = {"offload_tiles": 4}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one microbatch": {"micro_batch_size": 2},
    "breadth first": {"gradient_accumulation_order": "breadth_first"},
    "alpha 1/2, states": {"offload_alpha": 0.5, "offload_states": "all", "clip_grad": 0.0, **TILES},
    "swept, hidden states": {
        "offload_alpha": 0.5,
        "offload_granularity": "tile",
        "offload_slot_tiles": 2,
        "offload_hidden_states": True,
        **TILES,
    },
    "experts": {"model": "qwen3-moe-tiny", "moe_aux_loss_coeff": 0.1},
}
Found = tuple[list[float], Statistics | None, MemoryPlan | None, list[float]]


def train_on_rank(is_packed: bool, **options: Any) -> Found:
    """Losses and gradient norms of all steps, each with the loss of a forward after it; statistics and plan at the end;
    and arena bytes after each step."""
    data: dict[str, Any] = {"mock_data": True}
    if is_packed:
        data = {"train_data": PackedSamples(PACKINGS, VOCABULARY, SEQ_LENGTH)}
    with memo.Trainer(**data, **{**RUN, **options}) as training:
        numbers: list[float] = []
        arenas: list[float] = []
        transients = training.parts.transients
        for _ in range(STEPS):
            record = training.step()
            evaluated = loss_of(training.parts, training.feed.peek()).item()
            numbers += record.lm_loss, record.grad_norm, evaluated
            found = None if transients is None else transients.statistics()
            arenas.append(0 if found is None else found.arena_bytes)
            if transients is not None and transients.allocator is not None:
                transients.allocator.set_poison(True)  # whoever reads a block after its end reads NaN
        if transients is None or transients.planned is None:
            return numbers, None, None, arenas
        return numbers, transients.statistics(), transients.planned.plan, arenas


@pytest.mark.parametrize("is_packed", [pytest.param(False, marks=pytest.mark.full), True], ids=["mock", "packed"])
@pytest.mark.parametrize("way", WAYS)
def test_the_steps_after_the_first_are_served_as_planned(way: str, is_packed: bool) -> None:
    """Bound: equal bits. Nothing falls back, though later steps ask for more than those that were recorded."""
    options = WAYS[way]
    plain, _, _, _ = run_ranks(1, train_on_rank, is_packed, **options, memory_planner="off")[0]
    numbers, found, plan, arenas = run_ranks(1, train_on_rank, is_packed, **options, **PLANNED)[0]
    assert numbers == plain
    assert arenas[: FIRST_STEPS - 1] == [0, 0]
    assert arenas[FIRST_STEPS - 1 :] == [plan.arena_bytes] * (STEPS - FIRST_STEPS + 1)
    assert (found.num_fallbacks, found.unasked, found.live_blocks) == (0, 0, 0), [str(m) for m in found.mismatches]
    assert found.requests == found.hits + found.native > (STEPS - FIRST_STEPS) * 50


def test_the_plan_is_that_of_a_rehearsal() -> None:
    """To the byte of what is reserved."""
    options = {**WAYS["alpha 1/2, states"], **PLANNED}
    *_, learned, _ = run_ranks(1, train_on_rank, True, **options)[0]
    *_, rehearsed, arenas = run_ranks(1, train_on_rank, True, **options, memory_planner_from="rehearsal")[0]
    assert learned.arena_bytes == rehearsed.arena_bytes == arenas[0]


@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2},
        {"cp": 2},
        *(pytest.param({"cp": 2, "cp_comm_type": kind}, marks=pytest.mark.full) for kind in ("p2p", "a2a")),
    ],
    ids=["pp2", "cp2", "cp2 p2p", "cp2 a2a"],
)
def test_several_ranks_learn_together(layout: dict[str, Any]) -> None:
    """Threads that send messages hold their memory for a while, so that a request may be served otherwise: counted."""
    plain = run_ranks(2, train_on_rank, True, **layout, memory_planner="off")
    planned = run_ranks(2, train_on_rank, True, **layout, **PLANNED)
    for (numbers, found, _, _), (expected, *_) in zip(planned, plain, strict=True):
        assert numbers == expected
        assert found.hits >= 0.75 * (found.requests - found.native) > 0


def reported_on_rank(folder: str, train_iters: int) -> str:
    save = str(Path(folder, str(train_iters)))
    with memo.Trainer(mock_data=True, **{**RUN, **PLANNED, "train_iters": train_iters}, save=save) as training:
        assert training.parts.transients is not None
        before = training.parts.transients.headline()
        training.train()
        return f"{before}\n{training.parts.transients.report()}"


def test_a_run_that_ends_before_has_no_plan_and_says_so(tmp_path: Path) -> None:
    (told,) = run_ranks(1, reported_on_rank, str(tmp_path), FIRST_STEPS)
    assert told == (
        "torch's own allocator serves the first steps; a plan is made from them, for the steps after\n"
        "planned memory: none (training ended before a step was recorded and planned)"
    )
    (told,) = run_ranks(1, reported_on_rank, str(tmp_path), FIRST_STEPS + 1)
    assert "requests at their address" in told


def skipped_on_rank() -> list[bool]:
    """Whether a plan is due after steps of which the first two update nothing."""
    transients = Transients(MemoryConfig(memory_planner="auto"), "cpu", {})
    transients.learn()
    return [transients.stepped(updated) for updated in (False, False, True, True, False, True)]


def test_no_step_is_recorded_before_one_has_updated_the_weights() -> None:
    """The optimizer makes its moments in its first update, and they outlive the step."""
    assert run_ranks(1, skipped_on_rank)[0] == [False, False, False, False, True, False]

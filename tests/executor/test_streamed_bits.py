"""Where states live changes nothing: every placement gives the bits of the run that keeps them on the device.

torch.equal on losses, gradient norms, masters and moments over 20 steps with clipping and a schedule of the learning
rate, with evaluations in between; the resident run has the same layout, dtype and swapping. Streamed runs have slots
poisoned with NaN, copies late, at random moments or in threads, and every access checked. Documents are packed.
"""

import itertools
from typing import Any

import pytest
from layouts import tiny
from ranks import run_ranks
from streamed_steps import PLACEMENTS, SMALL, SWAPS, TRAINING, Course, course_of, unlike
from swapped_steps import Copies, Workplace, observed, profiled_once

from memo.config import RunConfig

DTYPES = ("fp32", "bf16")
COPIES: tuple[Copies, ...] = ("lazy", "random", "threads")

ACCUMULATED: dict[str, Any] = {"num_layers": 4, "global_batch_size": 2}
TIED: dict[str, Any] = {"untie_embeddings_and_output_weights": False}
CASES: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one process": (1, "llama-tiny", {"num_layers": 4, "global_batch_size": 1}),
    "one process, two microbatches": (1, "gpt-tiny", ACCUMULATED),
    "tp2": (2, "llama-tiny", {"tp": 2, **ACCUMULATED}),
    "pp2": (2, "gpt-tiny", {"pp": 2, "num_layers": 4, "global_batch_size": 3}),  # its embedding is tied over both
    "pp2 interleaved": (2, "llama-tiny", {"pp": 2, "vpp": 2, **ACCUMULATED, **TIED}),
    "dp2": (2, "qwen3-tiny", {"num_layers": 4, "global_batch_size": 4}),
    "tp2 pp2": (4, "gpt2-tiny", {"tp": 2, "pp": 2, **ACCUMULATED}),
}


def streamed_runs(turn: int) -> list[tuple[str, str, str, Copies]]:
    """(placement, swap, dtype, copies): each placement once, in all its combinations over six turns."""
    kinds = list(itertools.product(SWAPS, DTYPES))
    return [
        (placement, *kinds[(turn + 2 * i) % len(kinds)], COPIES[(turn + i) % len(COPIES)])
        for i, placement in enumerate(PLACEMENTS)
    ]


def examine(config: RunConfig, world_size: int, turn: int) -> tuple[list[str], list[float]]:
    """Streamed runs of one layout, each against its resident one: what differs, and gradient norms."""
    workplace, found = Workplace(config, world_size), []
    resident: dict[tuple[str, bool], Course] = {}
    with profiled_once():
        for placement, swapping, dtype, copies in streamed_runs(turn):
            common = {"params_dtype": dtype, **SWAPS[swapping]}
            key = dtype, swapping == "kept"  # all alphas give the same bits
            if key not in resident:
                resident[key], _ = course_of(workplace, **common)
            with observed(copies=copies):
                course, model = course_of(workplace, **common, **PLACEMENTS[placement])
            assert model.states is not None and model.states.host_bytes > 0
            found += [f"{placement}, {swapping}, {dtype}, {copies}: {x}" for x in unlike(course, resident[key])]
    return found, [figures[1] for course in resident.values() for figures in course.figures if len(figures) == 3]


@pytest.mark.parametrize("name", CASES)
def test_placement_changes_no_bit(name: str) -> None:
    world_size, model, overrides = CASES[name]
    config = tiny(model, **{**SMALL, **TRAINING, "num_query_groups": None, **overrides})
    ranks = run_ranks(world_size, examine, config, world_size, list(CASES).index(name), timeout_s=280)
    assert [found for found, _ in ranks] == [[]] * world_size
    norms = ranks[0][1]
    assert max(norms) > config.training.clip_grad, "clipping must be at work"

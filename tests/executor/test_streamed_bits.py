"""Where states live changes nothing: every placement gives the bits of the run that keeps them on the device.

torch.equal on losses, gradient norms, masters and moments over six steps with clipping and a schedule of the learning
rate, with an evaluation in between; the resident run has the same layout, dtype and swapping. Streamed runs have slots
poisoned with NaN, copies late, at random moments or in threads, and every access checked. Documents are packed.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from layouts import tiny
from ranks import run_ranks
from streamed_steps import ALL, PLACEMENTS, SMALL, SWAPS, TRAINING, Course, course_of, gradients, unlike
from swapped_steps import Copies, Workplace, copy_weights, observed, profiled_once
from torch import Tensor

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
    "dp2, moments in bf16": (
        2,
        "llama-tiny",
        {"num_layers": 4, "global_batch_size": 4, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"},
    ),
    "experts": (1, "qwen3-moe-tiny", {"num_layers": 4, "global_batch_size": 1}),
    "dp2, experts in some layers": (
        2,
        "qwen3-moe-tiny",
        {"num_layers": 4, "global_batch_size": 2, "moe_layer_freq": "[0]*2+[1]*2", "moe_ffn_hidden_size": 48},
    ),
    "delta nets": (1, "qwen3.5-tiny", {"num_layers": 4, "global_batch_size": 1}),
    "tp2 pp2": (4, "gpt2-tiny", {"tp": 2, "pp": 2, **ACCUMULATED}),
    "dp2, adapters": (2, "qwen3-tiny", {"num_layers": 4, "global_batch_size": 4, "lora_rank": 3, "clip_grad": 0.02}),
    "a model in 8 bits": (
        1,
        "llama-tiny",
        {"num_layers": 4, "global_batch_size": 2, "lora_rank": 3, "quantize": "int8", "clip_grad": 0.02},
    ),
    "frozen layers": (1, "llama-tiny", {"num_layers": 4, "global_batch_size": 2, "freeze": "layers.[13].*"}),
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


# tp 2 pp 2 is what tp 2 and pp 2 show one by one.
@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.full] if x == "tp2 pp2" else []) for x in CASES])
def test_placement_changes_no_bit(name: str) -> None:
    world_size, model, overrides = CASES[name]
    config = tiny(model, **{**SMALL, **TRAINING, "num_query_groups": None, **overrides})
    ranks = run_ranks(world_size, examine, config, world_size, list(CASES).index(name))
    assert [found for found, _ in ranks] == [[]] * world_size
    norms = ranks[0][1]
    assert max(norms) > config.training.clip_grad, "clipping must be at work"


# Sharded gradients and weights.

ZEROS: dict[str, dict[str, Any]] = {
    "ZeRO-2": {"data_parallel_sharding_strategy": "optim_grads"},
    "ZeRO-3": {"data_parallel_sharding_strategy": "optim_grads_params"},
}
ON_DEVICE: dict[str, Any] = {"offload_states": "none"}


def examine_sharding(config: RunConfig, world_size: int) -> list[str]:
    """ZeRO-2 and ZeRO-3 in every placement against ZeRO-1 on the device, with one microbatch."""
    workplace, found = Workplace(config, world_size), []
    resident = {dtype: course_of(workplace, params_dtype=dtype)[0] for dtype in DTYPES}
    placements = {"device": ON_DEVICE, "all": ALL, "fractions": PLACEMENTS["fractions"]}
    for turn, (zero, placement) in enumerate(itertools.product(ZEROS, placements)):
        dtype = DTYPES[turn % 2]
        with observed(copies=COPIES[turn % 3]):
            course, model = course_of(workplace, params_dtype=dtype, **ZEROS[zero], **placements[placement])
        assert model.states is not None
        assert all(b.gradients is None for unit in model.data_parallel.layer_units.values() for b in unit.buckets)
        found += [f"{zero}, {placement}, {dtype}: {x}" for x in unlike(course, resident[dtype])]
    return found


def test_sharded_gradients_and_weights_change_no_bit_of_one_microbatch() -> None:
    config = tiny("llama-tiny", **SMALL, **TRAINING, num_query_groups=None, num_layers=4, global_batch_size=2)
    assert run_ranks(2, examine_sharding, config, 2) == [[], []]


MICROBATCHES = 4


@dataclass
class Accumulation:
    """Gradients of one step on one rank, by strategy, and what differs between placements of one strategy."""

    gradients: dict[str, dict[str, Tensor]]
    unequal: list[str]


def examine_accumulation(config: RunConfig, world_size: int) -> Accumulation:
    workplace = Workplace(config, world_size)
    batches = workplace.batches()
    plain = workplace.build(params_dtype="fp32")
    exact = workplace.build(params_dtype="fp64")
    copy_weights(exact, plain)
    found = Accumulation({"ZeRO-1": gradients(plain, batches), "exact": gradients(exact, batches)}, [])
    for zero, strategy in ZEROS.items():
        for placement, values in {"device": ON_DEVICE, **PLACEMENTS}.items():
            with observed():
                model = workplace.build(params_dtype="fp32", **strategy, **values)
            ours = gradients(model, batches)
            first = found.gradients.setdefault("sharded", ours)
            found.unequal += [f"{zero}, {placement}: {x}" for x in first if not torch.equal(ours[x], first[x])]
    return found


@pytest.mark.parametrize("layout", [{}, pytest.param({"cp": 2}, marks=pytest.mark.full)], ids=["dp2", "cp2"])
def test_sharded_gradients_of_several_microbatches(layout: dict[str, Any]) -> None:
    """Each microbatch is reduced by itself, so sums have another order: at most twice as wrong as ZeRO-1 against fp64.

    Every placement under ZeRO-2 and ZeRO-3 gives the same bits.
    """
    batch = 2 * MICROBATCHES // layout.get("cp", 1)
    config = tiny("llama-tiny", **SMALL, num_query_groups=None, num_layers=4, global_batch_size=batch, **layout)
    for rank in run_ranks(2, examine_accumulation, config, 2):
        assert rank.unequal == []
        exact = rank.gradients["exact"]
        for name, value in exact.items():
            plain, ours = ((rank.gradients[run][name] - value).norm() for run in ("ZeRO-1", "sharded"))
            assert ours <= 2 * plain + 4 * torch.finfo(torch.float32).eps * value.norm(), name

"""A plan for packed documents: attention asks for what it likes within its block, all else has its address.

The allocator belongs to the process, so each test trains in processes of its own.
"""

from typing import Any

import pytest
import torch.distributed as dist
from packed_samples import PackedSamples
from ranks import run_ranks
from trainers import SMALL_RUN

import memo
from memo.allocator.statistics import Statistics
from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import ATTENTION
from memo.attention.blocks import Documents
from memo.train import planned_memory

SEQ_LENGTH, VOCABULARY = SMALL_RUN["seq_length"], 257
MIN_BYTES = 256
PACKINGS = ((), (63,), (1,), (5, 9, 30, 31), (40, 50), tuple(range(1, SEQ_LENGTH)))
"""One document; two of which one is long; several; as many as there are tokens."""
STEPS = len(PACKINGS) // 2  # of two samples each
RUN: dict[str, Any] = {**SMALL_RUN, "global_batch_size": 2, "train_iters": 100, "vocab_size": VOCABULARY}
RUN |= {"model": "llama-tiny", "offload_alpha": "off"}
PLANNED = {
    "memory_planner": "auto",
    "memory_planner_min_bytes": MIN_BYTES,
    "memory_planner_from": "rehearsal",  # all steps of training are then served
}
TILES = {"offload_tiles": 4, "profile_cache": "off"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "recompute full": {"recompute_granularity": "full"},
    "recompute selective": {"recompute_granularity": "selective"},
    "alpha 1/2, states": {"offload_alpha": 0.5, "offload_states": "all", **TILES},
    "bf16, optimizer in host memory": {"params_dtype": "bf16", "offload_states": "optimizer"},
    "swept": {"offload_alpha": 0.0, "offload_granularity": "tile", "offload_slot_tiles": 1, **TILES},
    "delta nets": {"model": "qwen3.5-tiny", "micro_batch_size": 2},
    "delta nets, swept": {
        "model": "qwen3.5-tiny",
        "offload_alpha": 0.0,
        "offload_granularity": "tile",
        "offload_slot_tiles": 1,
        **TILES,
    },
}
IN_FULL = {"recompute full", "delta nets, swept"}
"""What others show in part each. test_train_learned_plan.py has plain runs, and several ranks."""

Found = tuple[list[float], Statistics | None, MemoryPlan | None]


def train_on_rank(packings: Any, steps: int, **options: Any) -> Found:
    """Losses and gradient norms of the steps; of a plan its statistics and itself."""
    if "simulate_world" in options:
        dist.destroy_process_group()
    samples = PackedSamples(packings, VOCABULARY, SEQ_LENGTH)
    with memo.Trainer(train_data=samples, **{**RUN, **options}) as training:
        transients = training.parts.transients
        if transients is not None:
            assert transients.planned is not None and transients.allocator is not None, transients.reason
            transients.allocator.set_poison(True)  # whoever reads a block after its end reads NaN
        records = [training.step() for _ in range(steps)]
        numbers = [number for record in records for number in (record.lm_loss, record.grad_norm)]
        if transients is None or transients.planned is None:
            return numbers, None, None
        return numbers, transients.statistics(), transients.planned.plan


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in IN_FULL)) for name in LAYOUTS])
def test_every_packing_is_served_by_one_plan(name: str) -> None:
    """Bound: equal bits. No request falls back in any step, and none of the plan is missing."""
    options = {"params_dtype": "fp32", **LAYOUTS[name]}
    plain, _, _ = run_ranks(1, train_on_rank, PACKINGS, STEPS, **options, memory_planner="off")[0]
    planned, found, plan = run_ranks(1, train_on_rank, PACKINGS, STEPS, **options, **PLANNED)[0]
    assert planned == plain
    assert (found.num_fallbacks, found.unasked, found.live_blocks) == (0, 0, 0), [str(m) for m in found.mismatches]
    assert found.requests == found.hits + found.native > STEPS * 50
    assert any(phase.kind == ATTENTION for phase in plan.phases)


@pytest.mark.parametrize("model", ["qwen3-tiny", "gpt-oss-tiny"])
def test_a_batch_without_packed_documents_has_the_bits_of_the_run_without_a_plan(model: str) -> None:
    """Its one block comes from the kernel as it is; norms of heads, or sinks, sum over it."""
    options = {"model": model, "micro_batch_size": 2, "params_dtype": "fp32"}
    plain, _, _ = run_ranks(1, train_on_rank, [()], 2, **options, memory_planner="off")[0]
    planned, _, _ = run_ranks(1, train_on_rank, [()], 2, **options, **PLANNED)[0]
    assert planned == plain


@pytest.mark.parametrize("rank", [3, pytest.param(0, marks=pytest.mark.full)])
@pytest.mark.parametrize("cp_comm_type", ["p2p", "all_gather", "a2a", "a2a+p2p"])
def test_every_packing_is_served_on_context_parallel_ranks(cp_comm_type: str, rank: int) -> None:
    """One rank alone, so that no thread sends messages, whose numbers mean nothing."""
    world = {"simulate_world": "cp=4", "simulate_rank": rank, "cp_comm_type": cp_comm_type, "params_dtype": "fp32"}
    options = {**world, "num_attention_heads": 4, "num_query_groups": 4}
    _, found, _ = run_ranks(1, train_on_rank, PACKINGS, STEPS, **options, **PLANNED)[0]
    assert (found.num_fallbacks, found.unasked) == (0, 0), [str(mismatch) for mismatch in found.mismatches]
    assert found.requests > STEPS * 50


def surprised_on_rank(**options: Any) -> Found:
    """Trains where the packings that were recorded asked for less than those of the steps."""

    def short_documents(seq_length: int, batch: int, call_tokens: int) -> tuple[Documents, ...]:
        return 2 * (((*range(0, seq_length, 4), seq_length),) * batch,)

    planned_memory.demanding_packings = short_documents
    return train_on_rank(PACKINGS, STEPS, **options)


def test_what_exceeds_the_block_is_served_and_counted() -> None:
    options = {"params_dtype": "fp32"}
    plain, _, _ = run_ranks(1, train_on_rank, PACKINGS, STEPS, **options, memory_planner="off")[0]
    planned, found, _ = run_ranks(1, surprised_on_rank, **options, **PLANNED)[0]
    assert planned == plain
    assert found.fallbacks["block"] > 0
    assert found.num_fallbacks == found.fallbacks["block"]
    told = {str(mismatch) for mismatch in found.mismatches}
    assert any(text.startswith(f"{ATTENTION} layer ") and "block: " in text for text in told), told

"""Planned memory, a GPU's default: same bits, every address as planned, nothing asked of the device after step one.

The allocator belongs to its process, so each run trains in one of its own.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_sizes import SHORTER
from ranks import run_ranks

import memo
from memo.allocator.statistics import Statistics
from memo.artifacts.memory_plan import MemoryPlan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 5
RUN: dict[str, Any] = {
    "mock_data": True,
    "vocab_size": 1024,
    "seq_length": 4096 // SHORTER,
    "train_iters": STEPS,
    "lr": 1e-3,
    "device": "cuda",
    "deterministic": True,
    "profile_cache": "off",
    "progress": False,
}

Found = tuple[list[float], int, int, MemoryPlan | None, Statistics | None]


def train(**run: Any) -> Found:
    """Losses; device mallocs after the first steps; bytes reserved at most; plan and statistics."""
    dist.destroy_process_group()  # run_ranks' own
    with memo.Trainer("llama-tiny", **RUN, **run) as trainer:
        losses = [trainer.step().lm_loss for _ in range(3)]
        before = torch.cuda.memory_stats()["num_device_alloc"]
        losses += [trainer.step().lm_loss for _ in range(STEPS - 3)]
        mallocs = torch.cuda.memory_stats()["num_device_alloc"] - before
        transients = trainer.parts.transients
        plan = None if transients is None or transients.planned is None else transients.planned.plan
        assert transients is None or plan is not None, transients.reason
        found = None if transients is None else transients.statistics()
        return losses, mallocs, torch.cuda.max_memory_reserved(), plan, found


@pytest.mark.parametrize(("alpha", "planned_from"), [("off", "rehearsal"), (0.5, "training")])
def test_every_request_is_at_its_address_and_no_bit_changes(alpha: str | float, planned_from: str) -> None:
    plain: Found = run_ranks(1, train, timeout_s=240, offload_alpha=alpha, memory_planner="off")[0]
    options = {"offload_alpha": alpha, "memory_planner_min_bytes": 1 << 16, "memory_planner_from": planned_from}
    planned: Found = run_ranks(1, train, timeout_s=240, **options)[0]
    losses, mallocs, _, plan, found = planned
    assert losses == plain[0]
    assert plan is not None and found is not None
    assert found.hits > 0 and found.hits == found.requests - found.native, found.mismatches
    assert mallocs == 0
    # What was in use at once is what the plan foresaw, to the byte up to its alignment; what is reserved is the plan's.
    assert plan.lower_bound_bytes * 0.99 <= found.peak_bytes <= plan.arena_bytes
    assert found.arena_bytes == plan.arena_bytes

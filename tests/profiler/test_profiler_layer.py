"""The profile of a layer: sane numbers, and ranks that disagree about time still run the same collectives."""

import time
from typing import Any

import pytest
import spared_measurements
import torch
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks

from memo.artifacts.layer_profile import LayerProfile
from memo.config import RunConfig
from memo.profiler import layer as profiler
from memo.train import layer_profile
from memo.train.build import build, build_mesh
from memo.train.parallel_model import ParallelModel


def _build(config: RunConfig, world_size: int) -> ParallelModel:
    rank = dist.get_rank() if dist.is_initialized() else 0
    return build(config, build_mesh(config, rank, world_size), torch.float64, torch.device("cpu"))


def _profile_with_one_slow_rank() -> list[float]:
    """Rank 1 takes longer than the limit for its first run of everything; rank 0 does not."""
    profiler.median_s, profiler._LONG_S = spared_measurements.median_s, 0.05
    once_s = profiler.once_s

    def slow(work: object, device: torch.device) -> float:
        if dist.get_rank() == 1:
            time.sleep(0.06)
        return once_s(work, device) + (0.06 if dist.get_rank() == 1 else 0.0)  # type: ignore[arg-type]

    profiler.once_s = slow
    measured: list[LayerProfile] = []
    profile_layer = layer_profile.profile_layer

    def keep(*args: Any) -> LayerProfile:
        measured.append(profile_layer(*args))
        return measured[-1]

    layer_profile.profile_layer = keep  # type: ignore[assignment]  each rank's own, before they take the slowest
    _build(tiny(tp=2, offload_alpha="auto", profile_cache="off"), 2)
    return [measured[0].forward_s, *measured[0].recompute_s.values()]


def test_ranks_agree_how_often_a_piece_runs() -> None:
    fast, slow = run_ranks(2, _profile_with_one_slow_rank)
    assert fast == slow  # both took the slower rank's first run for the answer
    assert all(seconds >= 0.06 for seconds in fast)


def test_a_profile_is_positive_and_names_every_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "median_s", spared_measurements.median_s)
    model = _build(tiny(offload_alpha=0.5, seq_length=128, profile_cache="off"), 1)
    assert model.chosen_swap is not None
    problem = model.chosen_swap.problem
    assert problem.forward_s > 0 and problem.backward_s > 0
    assert {group.name for group in problem.groups} == {"qkv", "residual", "fc1"}
    assert all(group.recompute_s > 0 for group in problem.groups)
    assert problem.offload.copy_s(1 << 20, 0.0) > 0 and problem.prefetch.copy_s(1 << 20, 0.0) > 0
    # Copies take turns with compute on a CPU: nothing hides.
    assert problem.offload.copy_s(1 << 20, 1.0) > 1.0

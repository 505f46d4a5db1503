"""Ranks of a stage that have unlike room move the same tiles, and each says so without contradicting itself."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks

from memo.executor.host_budget import HostBudget
from memo.planner.problem import Limit
from memo.spec.layer_ops import layer_ops
from memo.spec.schedule import Pipeline, one_f_one_b
from memo.train.build import build_mesh
from memo.train.swap import ChosenSwap, decide
from memo.units import GIB

RATE = 1e12
PROFILE: Any = SimpleNamespace(  # a layer that hides every copy
    forward_s=1.0,
    backward_s=2.0,
    longer_s=0.0,
    recompute_s={"qkv": 0.3, "residual": 0.1, "fc1": 0.4},
    offload_bytes_per_s=RATE,
    prefetch_bytes_per_s=RATE,
    offload_under_compute_bytes_per_s=RATE,
    prefetch_under_compute_bytes_per_s=RATE,
)


# With the states, 12 layers take 2.3 MB of the device where all activations stay and 2.2 MB where all that can moves;
# then 10 records of 34 to 162 KiB are on the host.
LARGE = GIB, GIB  # of the device, and of the host
LITTLE_HOST = 700_000
LITTLE_DEVICE = 2_200_000


def decided(alpha: float | str, rooms: list[tuple[int, int]]) -> tuple[ChosenSwap, str]:
    config = tiny("gpt-tiny", num_layers=12, offload_alpha=alpha)
    mesh = build_mesh(config, dist.get_rank(), 2)
    pipeline = Pipeline(1, 1, 2)
    ops = layer_ops(pipeline, 0, 12, one_f_one_b(pipeline, 0))
    free_bytes, host_bytes = rooms[dist.get_rank()]
    host = HostBudget(host_bytes, "by hand")
    chosen = decide(config, mesh, ops, PROFILE, "by hand", free_bytes, host, torch.device("cpu"))
    return chosen, chosen.describe()


def test_a_rank_that_could_move_more_names_the_other() -> None:
    """Its own limit would be none, with the tiles of a rank whose host memory is short."""
    rooms = [(LITTLE_DEVICE, GIB), (LITTLE_DEVICE, LITTLE_HOST)]
    (first, told), (second, _) = run_ranks(2, decided, "auto", rooms)
    assert first.solution.tiles == second.solution.tiles
    assert 0 < sum(first.solution.tiles.values()) < 24
    assert (first.solution.limit, second.solution.limit) == (Limit.OTHERS, Limit.HOST)
    assert "limit          another rank, which can move less\n" in told
    assert told.endswith("Ranks of a stage move the same tiles: those of the rank that can move least.")


def test_a_rank_that_need_not_move_anything_moves_what_it_can_with_the_others() -> None:
    """Where all activations would stay here but not elsewhere, this rank's limits of moving count, and no line of its
    header says that all stay."""
    rooms = [(GIB, LITTLE_HOST), (LITTLE_DEVICE, GIB)]
    (first, told), (second, _) = run_ranks(2, decided, "auto", rooms)
    assert first.solution.tiles == second.solution.tiles
    assert (first.solution.limit, second.solution.limit) == (Limit.HOST, Limit.OTHERS)
    for chosen in (first, second):
        assert not chosen.solution.moves_nothing_is_best
        assert chosen.problem.violated(chosen.solution.tiles) == []
    assert "all activations fit" not in told and "limit          host memory\n" in told


@pytest.mark.parametrize(
    ("alpha", "room", "limit"),
    [
        ("auto", LARGE, Limit.RESIDENT),
        ("auto", (LITTLE_DEVICE, GIB), Limit.EVERYTHING),
        (0.5, LARGE, Limit.REQUEST),
    ],
)
def test_ranks_that_agree_keep_their_reason(alpha: float | str, room: tuple[int, int], limit: Limit) -> None:
    for chosen, told in run_ranks(2, decided, alpha, [room, room]):
        assert chosen.solution.limit == limit and f"limit          {limit}\n" in told
        assert chosen.solution.moves_nothing_is_best == (limit == Limit.RESIDENT)

"""Tiles for each group: the best of all on the grid by brute force, and no better than a solver finds off the grid.

The references here are written from the definition of the problem, in their own arithmetic.
"""

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import linprog

from memo.planner.alpha import solve, solve_at
from memo.planner.problem import Limit, Link, SwapGroup, SwapProblem
from memo.units import MIB


def random_problem(rng: random.Random, policy: str = "auto", tiles: int = 8) -> SwapProblem:
    """What always moves fits every limit; beyond that each limit leaves room for none to all of the rest."""
    groups = tuple(
        SwapGroup(
            name,
            num_bytes=rng.randint(1, 4000) * MIB,
            recompute_s=rng.uniform(0.001, 0.2),
            buffer_bytes=rng.choice((0, rng.randint(1, 8000) * MIB)),
            entry_bytes=rng.randint(1, 4000) * MIB if name == "qkv" and rng.random() < 0.5 else 0,
        )
        for name in ("qkv", "residual", "fc1")
    )
    always, other = rng.randint(1, 2000) * MIB, sum(group.num_bytes for group in groups)
    buffers = sum(group.buffer_bytes + group.entry_bytes for group in groups)
    offload, prefetch = (Link(rate * rng.uniform(1, 1.5), rate) for rate in (rng.uniform(5e9, 6e10) for _ in range(2)))
    records = rng.randint(1, 60)
    fixed = rng.randint(0, 4000) * MIB
    return SwapProblem(
        policy=policy,  # type: ignore[arg-type]
        tiles=tiles,
        always={"input": always},
        groups=groups,
        never={},
        forward_s=(always + rng.uniform(0.01, 2) * other) / offload.under_compute_bytes_per_s,
        backward_s=(always + rng.uniform(0.01, 2) * other) / prefetch.under_compute_bytes_per_s,
        offload=offload,
        prefetch=prefetch,
        num_passes=records + 2,
        num_moves=records,
        num_records=records,
        host_bytes=int(records * (always + rng.uniform(0, 2) * other)),
        device_bytes=fixed + int(rng.uniform(0, 2) * buffers),
        fixed_buffer_bytes=fixed,
    )


def constraints(problem: SwapProblem, entered: set[str]) -> tuple[np.ndarray, np.ndarray]:
    """A x <= b over the groups' shares, each row in units of its largest number."""
    always = sum(problem.always.values())
    sizes = np.array([g.num_bytes for g in problem.groups], dtype=float)
    rebuild = np.array([g.recompute_s for g in problem.groups])
    buffers = np.array([g.buffer_bytes for g in problem.groups], dtype=float)
    entry = sum(g.entry_bytes for g in problem.groups if g.name in entered)
    there, back = problem.offload.under_compute_bytes_per_s, problem.prefetch.under_compute_bytes_per_s
    assert there is not None and back is not None
    matrix = np.stack([sizes / there, sizes / back + rebuild, sizes, buffers])
    bounds = np.array(
        [
            problem.forward_s - always / there,
            problem.backward_s + rebuild.sum() - always / back,
            problem.host_bytes / problem.num_records - always,
            problem.device_bytes - problem.fixed_buffer_bytes - entry,
        ]
    )
    scale = np.maximum(matrix.max(axis=1), np.abs(bounds))
    scale[scale == 0] = 1.0
    return matrix / scale[:, None], bounds / scale


def reference_saved_s(problem: SwapProblem) -> float:
    """The largest number of recompute seconds saved by real shares."""
    rebuild = np.array([g.recompute_s for g in problem.groups])
    stepping = [g.name for g in problem.groups if g.entry_bytes]
    best = -1.0
    for chosen in itertools.product((False, True), repeat=len(stepping)):
        entered = {name for name, is_in in zip(stepping, chosen, strict=True) if is_in}
        matrix, bounds = constraints(problem, entered)
        ranges = [(0, 0 if g.entry_bytes and g.name not in entered else 1) for g in problem.groups]
        result = linprog(-rebuild, A_ub=matrix, b_ub=bounds, bounds=ranges, method="highs-ds")
        if result.success:
            best = max(best, -result.fun)
    return best


def feasible(problem: SwapProblem) -> np.ndarray:
    """Every choice of tiles that breaks no limit, [choices, groups]: bytes and seconds to the rounding of floats."""
    counts = np.array(list(itertools.product(range(problem.tiles + 1), repeat=len(problem.groups))))
    entry_bytes = (counts > 0) @ np.array([group.entry_bytes for group in problem.groups])
    choices = []
    for entry in np.unique(entry_bytes):
        alike = counts[entry_bytes == entry]
        names = {g.name for g, count in zip(problem.groups, alike[0], strict=True) if count}
        matrix, bounds = constraints(problem, names)
        choices.append(alike[np.all(alike / problem.tiles @ matrix.T <= bounds + 1e-9, axis=1)])
    return np.concatenate(choices)


def saved_s(problem: SwapProblem, counts: np.ndarray) -> np.ndarray:
    return counts / problem.tiles @ np.array([group.recompute_s for group in problem.groups])


@pytest.mark.parametrize("tiles", [1, 4, 8, 16])
def test_tiles_are_the_best_of_all_that_break_no_limit(tiles: int) -> None:
    rng = random.Random(1)
    limits = []
    for _ in range(200):
        problem = random_problem(rng, tiles=tiles)
        solution = solve(problem)
        counts, every = np.array(list(solution.tiles.values())), feasible(problem)
        assert (counts == every).all(axis=1).any()
        assert saved_s(problem, counts) == pytest.approx(saved_s(problem, every).max(), rel=1e-9)
        assert solution.hidden_share == 1.0 and solution.exposed_s == pytest.approx(0.0, abs=1e-9)
        limits.append(solution.limit)
    tried = (Limit.OFFLOAD, Limit.PREFETCH, Limit.HOST, Limit.DEVICE, Limit.EVERYTHING)
    assert min(limits.count(limit) for limit in tried) >= 5, limits


def test_a_fine_grid_comes_close_to_real_shares() -> None:
    """The grid of 32 costs less than a tile of every group, and real shares are never worse."""
    rng = random.Random(1)
    for _ in range(50):
        problem = random_problem(rng, tiles=32)
        saved = float(saved_s(problem, np.array(list(solve(problem).tiles.values()))))
        best = reference_saved_s(problem)
        assert best - sum(group.recompute_s for group in problem.groups) / 32 <= saved <= best * (1 + 1e-9)


def test_paper_policy_takes_the_largest_common_share() -> None:
    """Closed form: the smallest of the bounds that each limit puts on one share for all groups."""
    rng = random.Random(3)
    for _ in range(50):
        problem = random_problem(rng, policy="paper")
        solution = solve(problem)
        matrix, bounds = constraints(problem, {group.name for group in problem.groups})
        shares = [1.0] + [float(b / a) for a, b in zip(matrix.sum(axis=1), bounds, strict=True) if a > 0]
        # Entry bytes that do not fit leave all at 0.
        alpha = max(0.0, min(shares)) if np.all(bounds >= 0) else 0.0
        assert set(solution.tiles.values()) == {int(alpha * 8 + 1e-9)}
        assert set(solution.alphas.values()) == {int(alpha * 8 + 1e-9) / 8}


def test_a_given_alpha_is_lowered_by_memory_alone() -> None:
    rng = random.Random(5)
    lowered = 0
    for _ in range(100):
        problem, alpha = random_problem(rng), rng.random()
        solution = solve_at(problem, alpha)
        count = next(iter(solution.tiles.values()))
        assert set(solution.tiles.values()) == {count}
        assert not {Limit.HOST, Limit.DEVICE} & set(problem.violated(solution.tiles))
        if count < int(alpha * 8):
            lowered += 1
            assert solution.limit in (Limit.HOST, Limit.DEVICE)
            assert solution.limit in problem.violated(problem.uniform(count + 1))
        else:
            assert solution.limit == Limit.REQUEST
    assert 20 < lowered < 80


def test_memory_that_any_share_takes_is_paid_only_where_it_is_worth_it() -> None:
    """qkv needs room for all its tokens at once, 300 bytes, which would hold 3/8 of fc1: 0.15 s saved."""
    fc1 = SwapGroup("fc1", 400, 0.4, 800)
    problem = replace(
        random_problem(random.Random(0)),
        always={"input": 100},
        forward_s=10.0,
        backward_s=10.0,
        offload=Link(1000.0, 1000.0),
        prefetch=Link(1000.0, 1000.0),
        host_bytes=10**12,
        fixed_buffer_bytes=0,
    )
    for qkv_s, device_bytes, expected, limit in (
        (0.1, 1100, {"qkv": 8, "fc1": 8}, Limit.EVERYTHING),
        (0.1, 800, {"qkv": 0, "fc1": 8}, Limit.DEVICE),
        (0.1, 300, {"qkv": 0, "fc1": 3}, Limit.DEVICE),
        (0.2, 800, {"qkv": 8, "fc1": 5}, Limit.DEVICE),
        (0.2, 300, {"qkv": 8, "fc1": 0}, Limit.DEVICE),
        (0.2, 299, {"qkv": 0, "fc1": 2}, Limit.DEVICE),
    ):
        qkv = SwapGroup("qkv", 300, qkv_s, 0, entry_bytes=300)
        solution = solve(replace(problem, groups=(qkv, fc1), device_bytes=device_bytes))
        assert (solution.tiles, solution.limit) == (expected, limit)
        assert solution.device_bytes == 100 * expected["fc1"] + (300 if expected["qkv"] else 0) <= device_bytes

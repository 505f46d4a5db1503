"""Problems are checked; the lower bound and the columns of time against brute force; the validator names the fault."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from memory_problems import at_random, blocks, most_live_bytes

from memo.errors import PlanError
from memo.planner.memory.dsa import Block, Instance, Problem, Solution, columns, lower_bound_bytes
from memo.planner.memory.overlaps import Overlaps
from memo.planner.memory.validator import validate

# The drawing of `lower_bound_bytes`.
DRAWN = Problem((Block("a", 0, 4, 1), Block("b", 1, 3, 1), Block("c", 2, 6, 2), Block("d", 4, 6, 1)))
SOLVED = Solution({"a": 0, "b": 1, "c": 2, "d": 0}, 4, 4, "optimal", "hand")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"blocks": (Block("x", 3, 3, 1),)}, "block x lives from 3 to 3: its upper must be above its lower"),
        ({"blocks": (Block("x", 0, 1, 0),)}, "block x has 0 bytes"),
        ({"blocks": (Block("x", 0, 1, -1),)}, "block x has -1 bytes"),
        ({"blocks": (Block("x", 0, 1, 1), Block("x", 2, 3, 1))}, "two blocks have the id x"),
        ({"blocks": (Block("x", 0, 1, 1 << 62),)}, f"{1 << 62} bytes in all"),
        ({"blocks": (Block("x", 0, 1 << 62, 1),)}, f"block x lives from 0 to {1 << 62}, beyond"),
        ({"blocks": (Block("x", -(1 << 62), 0, 1),)}, f"block x lives from {-(1 << 62)} to 0, beyond"),
        ({"blocks": (), "capacity_bytes": -1}, "capacity_bytes is -1"),
    ],
)
def test_what_is_no_problem_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Problem(**fields)


def test_bound_of_the_drawing() -> None:
    assert lower_bound_bytes(DRAWN) == 4
    assert lower_bound_bytes(replace(DRAWN, alignment_bytes=512)) == 3 * 512
    assert lower_bound_bytes(Problem(())) == 0


def test_columns_of_the_drawing() -> None:
    lower, upper, num_columns = columns(np.array([0, 2, 3, 5]), np.array([3, 5, 7, 7]))
    assert (lower.tolist(), upper.tolist(), num_columns) == ([0, 0, 1, 2], [1, 2, 3, 3], 3)


def test_bound_columns_and_overlaps_equal_brute_force() -> None:
    chance = random.Random(1)
    for _ in range(80):
        problem = at_random(chance, chance.randint(1, 150), chance.randint(1, 60), 1000, chance.choice((1, 64)))
        assert lower_bound_bytes(problem) == most_live_bytes(problem)
        instance = Instance.of(problem)
        by_id = {block.id: block for block in problem.blocks}
        ordered = [by_id[block_id] for block_id in instance.ids]
        overlaps = Overlaps(instance)
        for index, block in enumerate(ordered):
            near = {i for i, other in enumerate(ordered) if block.lower < other.upper and other.lower < block.upper}
            assert set(overlaps.of(index).tolist()) == near
            assert len(overlaps.of(index)) == len(near)
            assert overlaps.num_neighbours[index] == len(near) - 1
            assert overlaps.neighbour_bytes(instance.sizes)[index] == instance.sizes[sorted(near)].sum()
        pairs = sum(len(overlaps.of(index)) - 1 for index in range(len(ordered)))
        assert instance.num_pairs() == pairs // 2


def test_absurd_sizes_do_not_overflow() -> None:
    problem = Problem(blocks((0, 2, 1 << 59), (1, 3, 1 << 59), (2, 4, 3 << 59)))
    assert lower_bound_bytes(problem) == 4 << 59


def test_a_right_solution_passes() -> None:
    validate(DRAWN, SOLVED)
    validate(Problem(()), Solution({}, 0, 0, "optimal", "hand"))
    # Half-open: one may begin at the time and place where another ends.
    validate(Problem(blocks((0, 1, 5), (1, 2, 5))), Solution({0: 0, 1: 0}, 5, 5, "optimal", "hand"))


def moved(**offsets: int) -> dict[str, Any]:
    return {"offsets": {**SOLVED.offsets, **offsets}}


@pytest.mark.parametrize(
    ("problem", "change", "message"),
    [
        ({}, {"offsets": {"a": 0, "b": 1, "c": 2}}, "block d has no offset"),
        ({}, moved(e=9), "block e has an offset, but the problem does not know it"),
        ({}, moved(b=-1), "block b lies at -1, below 0"),
        ({"alignment_bytes": 2}, moved(), "block b lies at 1, not a multiple of 2"),
        ({"capacity_bytes": 3}, {}, "block c ends at 4, above the capacity of 3 bytes"),
        ({}, moved(b=0), "block b lies at 0 to 1 while block a lives at 0 to 1"),
        ({}, moved(c=1), "block c lies at 1 to 3 while block b lives at 1 to 2"),
        ({}, moved(d=3), "block d lies at 3 to 4 while block c lives at 2 to 4"),
        ({}, {"peak_bytes": 5}, "peak_bytes is 5, but the highest block ends at 4"),
        ({}, {"lower_bound_bytes": 5}, "lower_bound_bytes is 5, but the peak of 4 is lower"),
        ({}, {"lower_bound_bytes": 3}, "proof is 'optimal' with a peak of 4 bytes and a bound of 3"),
        ({}, {"proof": "feasible"}, "proof is 'feasible' with a peak of 4 bytes and a bound of 4"),
    ],
)
def test_the_validator_names_the_fault(problem: dict[str, Any], change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        validate(replace(DRAWN, **problem), replace(SOLVED, **change))

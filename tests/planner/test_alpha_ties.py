"""Which group gives way, and which of two equally good answers is kept: the rules behind small differences."""

from dataclasses import replace

import pytest

from memo.planner.alpha import solve
from memo.planner.problem import Limit, SwapGroup, SwapProblem
from tests.planner.test_alpha_limits import PROBLEM

# Bytes, not GiB: the parts of a group are rounded up to whole bytes, and that is what breaks a limit here.
SMALL = replace(PROBLEM, always={"input": 10}, fixed_buffer_bytes=0)

DEAR, CHEAP = SwapGroup("dear", 1000, 0.8, 0), SwapGroup("cheap", 1001, 0.1, 0)
WIDE, SLIM = SwapGroup("wide", 1001, 0.1, 1600), SwapGroup("slim", 1001, 0.1, 800)


@pytest.mark.parametrize("groups", [(DEAR, CHEAP), (CHEAP, DEAR)])
def test_the_group_that_is_worth_least_gives_way(groups: tuple[SwapGroup, ...]) -> None:
    """The host holds 10 + 1000 + 500.5 bytes a record: half of `cheap`, but its four parts take 501."""
    solution = solve(replace(SMALL, groups=groups, host_bytes=6 * (10 + 1000) + 3003))
    assert solution.tiles == {"dear": 8, "cheap": 3}


@pytest.mark.parametrize("groups", [(WIDE, SLIM), (SLIM, WIDE)])
def test_of_equally_good_tiles_those_that_take_less_memory_are_kept(groups: tuple[SwapGroup, ...]) -> None:
    """Eleven tiles fit in host memory; of `wide` each takes 200 bytes of the device, of `slim` 100."""
    problem = replace(SMALL, groups=groups, host_bytes=6 * (10 + 1001) + 3003, device_bytes=1600)
    assert solve(problem).tiles == {"wide": 3, "slim": 8}


@pytest.mark.parametrize("groups_in_order", [True, False])
def test_of_programs_that_gain_the_same_the_one_without_memory_at_once_is_kept(groups_in_order: bool) -> None:
    """fc1 alone saves 1.2 s. qkv saves 0.5 s, and the 500 bytes that it takes at once cost 0.5 s of fc1.

    In binary 0.5 + 1.2 x 7 / 12 comes out larger than 1.2 by one bit, which is no reason to take the memory.
    """
    groups = (SwapGroup("qkv", 300, 0.5, 0, entry_bytes=500), SwapGroup("fc1", 400, 1.2, 1200))
    problem: SwapProblem = replace(SMALL, tiles=12, groups=groups if groups_in_order else groups[::-1])
    solution = solve(replace(problem, device_bytes=1200))
    assert solution.tiles == {"qkv": 0, "fc1": 12}
    assert solution.limit == Limit.DEVICE


DENSE, BULKY = SwapGroup("dense", 100, 0.8, 1600), SwapGroup("bulky", 8000, 0.4, 0)


@pytest.mark.parametrize("groups", [(DENSE, BULKY), (BULKY, DENSE)])
def test_what_binds_is_told_of_the_group_of_which_a_byte_is_worth_most(groups: tuple[SwapGroup, ...]) -> None:
    """The device has room for five tiles of `dense`, the host for four of `bulky`; a byte of `dense` saves more."""
    problem = replace(SMALL, groups=groups, host_bytes=6 * (10 + 75 + 4100), device_bytes=1000)
    solution = solve(problem)
    assert solution.tiles == {"dense": 5, "bulky": 4}
    assert solution.limit == Limit.DEVICE

"""Degenerate problems give a sensible plan or one message; predictions against sums done by hand."""

from dataclasses import replace

import pytest

from memo.errors import HostMemoryError, PlanError, ResourceError
from memo.planner.alpha import solve, solve_at
from memo.planner.alpha_table import describe
from memo.planner.problem import Limit, Link, SwapGroup, SwapProblem
from memo.planner.solution import SwapSolution
from memo.spec.disk import Disk
from memo.units import GIB

LINK = Link(alone_bytes_per_s=16.0 * GIB, under_compute_bytes_per_s=8.0 * GIB)

# A GPT layer in units of 1 GiB, 8 layers of one stage: the last two stay.
PROBLEM = SwapProblem(
    policy="auto",
    tiles=8,
    always={"input": GIB, "attention_out": GIB},
    groups=(
        SwapGroup("qkv", 3 * GIB, 0.3, 0, 3 * GIB),
        SwapGroup("residual", GIB, 0.1, 2 * GIB),
        SwapGroup("fc1", 4 * GIB, 0.4, 8 * GIB),
    ),
    never={"attention_norm": GIB, "mlp_norm": GIB, "activation": 4 * GIB},
    forward_s=2.0,
    backward_s=4.0,
    offload=LINK,
    prefetch=LINK,
    num_passes=8,
    num_moves=6,
    num_records=6,
    host_bytes=100 * GIB,
    device_bytes=32 * GIB,
    fixed_buffer_bytes=7 * GIB,
)


def test_everything_moves_where_nothing_binds() -> None:
    solution = solve(PROBLEM)
    assert solution == SwapSolution(
        tiles={"qkv": 8, "residual": 8, "fc1": 8},
        alphas={"qkv": 1.0, "residual": 1.0, "fc1": 1.0},
        limit=Limit.EVERYTHING,
        moved_bytes=10 * GIB,
        host_bytes=60 * GIB,
        device_bytes=(7 + 3 + 10) * GIB,
        hidden_share=1.0,
        exposed_s=0.0,
        recompute_s=0.0,
        step_s=8 * (2.0 + 4.0),
        moves_nothing_is_best=False,
    )


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"forward_s": 0.5}, Limit.OFFLOAD),
        ({"backward_s": 0.5}, Limit.PREFETCH),
        ({"host_bytes": 30 * GIB}, Limit.HOST),
        ({"device_bytes": 12 * GIB}, Limit.DEVICE),
    ],
)
def test_each_limit_binds_in_its_turn(change: dict[str, float], limit: Limit) -> None:
    problem = replace(PROBLEM, **change)  # type: ignore[arg-type]
    solution = solve(problem)
    assert solution.limit == limit
    assert 0 < sum(solution.tiles.values()) < 24
    assert problem.violated(solution.tiles) == [] and solution.hidden_share == 1.0
    for name, count in solution.tiles.items():
        assert count == 8 or problem.violated(solution.tiles | {name: count + 1}) != []
    assert f"limit          {limit}" in describe(solution, problem)


def test_a_link_too_slow_for_what_always_moves_says_how_far_it_hides() -> None:
    """2 GiB at 8 GiB/s need 0.25 s, forward lasts 0.125: half passes under it, the rest alone at 16 GiB/s."""
    solution = solve(replace(PROBLEM, forward_s=0.125))
    assert solution.tiles == {"qkv": 0, "residual": 0, "fc1": 0}
    assert solution.limit == Limit.OFFLOAD
    copies_s, exposed_s = 2 * 0.125, 0.0625  # 2 GiB each way at 16 GiB/s, were nothing else going on
    assert solution.exposed_s == pytest.approx(exposed_s)
    assert solution.hidden_share == pytest.approx(1 - exposed_s / copies_s)
    assert solution.recompute_s == pytest.approx(0.8)
    assert solution.step_s == pytest.approx(8 * (0.125 + 4.0 + 0.8) + 6 * exposed_s)
    text = describe(solution, replace(PROBLEM, forward_s=0.125))
    assert "75 % hidden" in text and "Compute waits 62.5 ms" in text and "longer sequence" in text


def test_without_host_memory_the_message_names_need_and_remedy() -> None:
    with pytest.raises(HostMemoryError) as caught:
        solve(replace(PROBLEM, host_bytes=0))
    message = str(caught.value)
    for part in ("host memory", "6 records x 2.00 GiB = 12.00 GiB", "available are 0 B", "--offload-host-memory-gib"):
        assert part in message
    assert isinstance(caught.value, ResourceError)
    with pytest.raises(HostMemoryError):
        solve_at(replace(PROBLEM, host_bytes=12 * GIB - 1), 0.0)
    assert set(solve(replace(PROBLEM, host_bytes=12 * GIB)).tiles.values()) == {0}


def test_without_device_memory_the_message_names_need_and_remedy() -> None:
    with pytest.raises(PlanError, match=r"device memory.*7\.00 GiB even at alpha = 0.*6\.00 GiB.*--seq-length"):
        solve(replace(PROBLEM, device_bytes=6 * GIB))
    assert set(solve(replace(PROBLEM, device_bytes=7 * GIB)).tiles.values()) == {0}


@pytest.mark.parametrize("num_layers", [1, 2])
def test_one_or_two_layers_keep_everything_without_host_memory(num_layers: int) -> None:
    problem = replace(PROBLEM, num_passes=num_layers, num_moves=0, num_records=0, host_bytes=0)
    solution = solve(problem)
    assert set(solution.tiles.values()) == {8}
    assert solution.limit == Limit.NO_MOVES
    assert (solution.host_bytes, solution.hidden_share, solution.recompute_s) == (0, 1.0, 0.0)
    assert solution.step_s == num_layers * 6.0
    assert "No layer has to move" in describe(solution, problem)


def test_one_layer_with_little_device_memory_recomputes_a_part() -> None:
    problem = replace(PROBLEM, num_passes=1, num_moves=0, num_records=0, host_bytes=0, device_bytes=12 * GIB)
    solution = solve(problem)
    assert solution.limit == Limit.DEVICE
    assert 0 < sum(solution.tiles.values()) < 24 and solution.device_bytes <= 12 * GIB


def test_activations_that_fit_on_the_device_do_not_move() -> None:
    fitting = replace(PROBLEM, resident_bytes=32 * GIB, host_bytes=0)
    solution = solve(fitting)
    assert solution.moves_nothing_is_best and solution.limit == Limit.RESIDENT
    assert (solution.moved_bytes, solution.host_bytes, solution.device_bytes) == (0, 0, 32 * GIB)
    assert (solution.recompute_s, solution.step_s) == (0.0, 48.0)
    text = describe(solution, fitting)
    assert "Moving nothing is best" in text and "recomputed" not in text and "host memory    0 B" in text
    assert not solve(replace(PROBLEM, resident_bytes=32 * GIB + 1)).moves_nothing_is_best
    assert solve_at(replace(PROBLEM, resident_bytes=GIB), 1.0).moves_nothing_is_best  # obeyed, and told


def test_what_costs_nothing_to_recompute_stays_in_auto_and_moves_in_paper() -> None:
    groups = (*PROBLEM.groups, SwapGroup("norm", 2 * GIB, 0.0, 4 * GIB))
    auto = replace(PROBLEM, groups=groups)
    assert solve(auto).tiles == {"qkv": 8, "residual": 8, "fc1": 8, "norm": 0}
    assert solve(auto).limit == Limit.EVERYTHING
    paper = replace(auto, policy="paper")
    assert solve(paper).tiles == {"qkv": 8, "residual": 8, "fc1": 8, "norm": 8}
    only_free = replace(PROBLEM, groups=groups[-1:], host_bytes=12 * GIB)
    assert solve(only_free).tiles == {"norm": 0}


def test_a_share_on_the_grid_survives_round_off() -> None:
    """Room for exactly 3/10: ten tiles of 0.1 GiB do not add up in binary."""
    problem = replace(
        PROBLEM, tiles=10, groups=(SwapGroup("fc1", GIB, 0.1, 0),), forward_s=(2 * GIB + 0.3 * GIB) / (8 * GIB)
    )
    for policy in ("auto", "paper"):
        assert solve(replace(problem, policy=policy)).tiles == {"fc1": 3}


def test_sizes_that_do_not_divide_by_the_tiles_never_exceed_bytes() -> None:
    """Parts are counted rounded up, on host and device, so a budget one byte short loses a tile."""
    problem = replace(
        PROBLEM, groups=(SwapGroup("fc1", 1001, 0.1, 0),), always={"input": 10}, host_bytes=6 * (10 + 501)
    )
    assert solve(problem).tiles == {"fc1": 4}
    assert solve(replace(problem, host_bytes=6 * (10 + 501) - 1)).tiles == {"fc1": 3}
    problem = replace(PROBLEM, groups=(SwapGroup("fc1", 8, 0.1, 1001),), fixed_buffer_bytes=10, device_bytes=10 + 501)
    assert solve(problem).tiles == {"fc1": 4}
    assert solve(replace(problem, device_bytes=10 + 500)).tiles == {"fc1": 3}


def test_a_group_kept_out_by_the_memory_it_takes_at_once_names_device_memory() -> None:
    """One byte too few for qkv; what is left moves in full and fills the link further than device memory."""
    groups = (SwapGroup("qkv", GIB, 0.1, 0, 3 * GIB), SwapGroup("fc1", 4 * GIB, 0.4, 0))
    solution = solve(replace(PROBLEM, groups=groups, device_bytes=10 * GIB - 1))
    assert (solution.tiles, solution.limit) == ({"qkv": 0, "fc1": 8}, Limit.DEVICE)


def test_the_table_tells_tiles_and_alpha_of_each_group() -> None:
    problem = replace(PROBLEM, host_bytes=30 * GIB)  # 3 GiB beyond what always moves
    solution = solve_at(problem, 0.9)
    lines = describe(solution, problem).splitlines()
    assert lines[0] == "activations of one layer and microbatch on this rank:"
    assert lines[1].split() == ["tensor", "a", "layer", "tiles", "(alpha)", "between", "forward", "and", "backward"]
    table = {line.split()[0]: line for line in lines[2:10]}
    assert table["qkv"].split(maxsplit=5)[1:5] == ["3.00", "GiB", "3/8", "(0.900)"]
    assert table["qkv"].endswith("host memory, the rest recomputed in 188 ms")
    assert table["input"].split()[1:] == ["1.00", "GiB", "all", "host", "memory"]
    assert table["activation"].split()[1:] == ["4.00", "GiB", "none", "recomputed"]
    assert "--offload-alpha was lowered: host memory does not hold more." in lines[-1]
    assert "30.00 GiB of 30.00 GiB for this rank: 6 records of 5.00 GiB" in "\n".join(lines)


def test_the_table_says_that_a_pass_is_a_section() -> None:
    problem = replace(PROBLEM, sections=4)
    text = describe(solve_at(problem, 0.5), problem)
    assert text.startswith("activations of one section (4 a layer) and microbatch on this rank:\n")
    assert "a section" in text and "in the backward of a section" in text and "layer" not in text.split("\n", 1)[1]


def test_a_disk_without_direct_io_is_named() -> None:
    """Records would fill the page cache, which is the host memory that was to be saved."""
    direct = replace(PROBLEM, disk=Disk(1 << 40, 1e9, 1e9))
    buffered = replace(PROBLEM, disk=Disk(1 << 40, 1e9, 1e9, is_direct=False))
    assert "has no direct I/O" not in describe(solve(direct), direct)
    assert "--offload-nvme-path has no direct I/O" in describe(solve(buffered), buffered)

"""Every solution is valid and tells the truth about itself, whichever solver found it; time limits hold."""

import os
import random
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import psutil
import pytest
from memory_problems import at_random, bad_start, blocks, cut_rectangle, is_valid, most_live_bytes

from memo.planner.memory import exact, greedy, skyline
from memo.planner.memory.dsa import Block, Instance, Problem
from memo.planner.memory.exact import Exact
from memo.planner.memory.overlaps import Overlaps
from memo.planner.memory.solve import solve
from memo.planner.memory.task import Task

# At most 6 bytes live at once, and yet no plan has a peak below 7.
HOLED = Problem(
    blocks(
        (0, 1, 3), (0, 2, 3), (1, 3, 1), (2, 3, 1), (1, 4, 2), (2, 4, 2), (4, 5, 1), (3, 6, 2), (4, 6, 3), (5, 6, 1)
    )
)  # fmt: skip


def fits(problem: Problem, capacity_bytes: int) -> bool:
    """By trying every address for every block."""

    def try_rest(placed: list[tuple[Block, int]], rest: tuple[Block, ...]) -> bool:
        if not rest:
            return True
        block, *others = rest
        for begin in range(capacity_bytes - block.num_bytes + 1):
            free = all(
                block.lower >= other.upper
                or other.lower >= block.upper
                or begin >= at + other.num_bytes
                or at >= begin + block.num_bytes
                for other, at in placed
            )
            if free and try_rest([*placed, (block, begin)], tuple(others)):
                return True
        return False

    return try_rest([], problem.blocks)


@pytest.mark.parametrize("count", [2_000, pytest.param(10_000, marks=pytest.mark.full)])
def test_thousands_of_small_problems(count: int) -> None:
    chance = random.Random(2)
    optimal = 0
    for _ in range(count):
        alignment_bytes = chance.choice((1, 1, 8, 512))
        problem = at_random(chance, chance.randint(0, 9), chance.randint(1, 12), 2000, alignment_bytes)
        solution = solve(problem, time_limit_s=0.02, exact="none")
        assert is_valid(problem, solution), problem
        assert solution.lower_bound_bytes == most_live_bytes(problem), problem
        assert (solution.proof == "optimal") == (solution.peak_bytes == solution.lower_bound_bytes), problem
        optimal += solution.proof == "optimal"
    assert optimal > 0.96 * count


def test_the_stated_gap_is_true_where_the_optimum_is_known() -> None:
    chance = random.Random(3)
    optimal = 0
    for _ in range(200):
        height = chance.randint(20, 400)
        problem = cut_rectangle(chance, chance.randint(2, 30), 40, height)
        solution = solve(problem, time_limit_s=0.1, exact="none")
        assert is_valid(problem, solution)
        assert solution.lower_bound_bytes == height
        assert solution.gap == pytest.approx(solution.peak_bytes / height - 1)
        optimal += solution.proof == "optimal"
    assert optimal >= 170


@pytest.mark.parametrize("solver", ["cpsat", "mip"])
def test_exact_solvers_prove_what_no_bound_shows(solver: Exact) -> None:
    if solver == "cpsat":
        pytest.importorskip("ortools")
    assert not fits(HOLED, 6)
    problem = Problem(tuple(block._replace(num_bytes=1000 * block.num_bytes) for block in HOLED.blocks))
    solution = solve(problem, time_limit_s=60.0, exact=solver)
    assert is_valid(problem, solution)
    assert (solution.peak_bytes, solution.lower_bound_bytes, solution.proof) == (7000, 7000, "optimal")
    assert exact.NAMES[solver] in solution.seconds


@pytest.mark.parametrize("solver", ["cpsat", "mip"])
def test_exact_solvers_find_addresses_of_their_own(solver: str) -> None:
    if solver == "cpsat":
        pytest.importorskip("ortools")
    task, overlaps = bad_start(cut_rectangle(random.Random(4), 8, 20, 50))
    answer = exact.run(solver, task, overlaps)
    assert task.instance.peak(answer.offsets) == task.instance.bound == answer.bound
    assert answer.is_done


def test_mip_with_rounded_sizes_gives_exact_addresses_and_claims_no_bound() -> None:
    chance = random.Random(5)
    shapes = [(block.lower, block.upper, 10**9 * block.num_bytes + chance.randrange(10**6)) for block in HOLED.blocks]
    problem = Problem(blocks(*shapes))
    task, overlaps = bad_start(problem)
    answer = exact.run("mip", task, overlaps)
    assert answer.is_done
    assert answer.bound == task.bound
    ends = answer.offsets + task.instance.sizes
    assert 7 * 10**9 <= ends.max() <= 7 * 10**9 + 10**7
    solution = solve(problem, time_limit_s=60.0, exact="mip")
    assert is_valid(problem, solution)
    assert solution.lower_bound_bytes == most_live_bytes(problem)
    assert solution.proof != "optimal"


def _put_first_in_path(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)


def test_without_highs_cbc_solves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "highspy.py").write_text("raise ImportError('not installed')\n")
    _put_first_in_path(monkeypatch, tmp_path)
    task, overlaps = bad_start(HOLED)
    answer = exact.run("mip", task, overlaps)
    assert (task.instance.peak(answer.offsets), answer.bound, answer.is_done) == (7, 7, True)


def test_a_killed_solver_leaves_no_child_and_what_was_known() -> None:
    task, overlaps = bad_start(cut_rectangle(random.Random(6), 60, 100, 1000), seconds=0.05)
    answer = exact.run("mip", task, overlaps)
    assert (answer.offsets == task.offsets).all()
    assert (answer.bound, answer.is_done) == (task.bound, False)
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children()]
    assert not [command for command in commands if "memo.planner.memory.worker" in command]


@pytest.mark.parametrize(
    ("dies", "says"),
    [
        ("raise SystemExit(7)", "MIP broke down with exit status 7 (it said nothing)"),
        ("raise ImportError('no solver here')", "MIP broke down with exit status 1 (ImportError: no solver here)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "MIP broke down with signal SIGSEGV ("),
    ],
)
def test_a_dead_worker_is_told_with_its_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str], dies: str, says: str
) -> None:
    """What was known stays known."""
    (tmp_path / "pulp.py").write_text(f"{dies}\n")
    _put_first_in_path(monkeypatch, tmp_path)
    task, overlaps = bad_start(HOLED)
    answer = exact.run("mip", task, overlaps)
    assert (answer.offsets == task.offsets).all() and not answer.is_done
    told = capfd.readouterr().err
    assert told.count("\n") == 1 and says in told and "install pulp and highspy anew" in told


def test_solvers_take_the_cpus_that_the_system_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Outside Linux there is no sched_getaffinity; a solver must not die of it."""
    (tmp_path / "sitecustomize.py").write_text("import os\ndel os.sched_getaffinity\n")
    _put_first_in_path(monkeypatch, tmp_path)
    for solver in ("mip", "cpsat") if find_spec("ortools") else ("mip",):
        task, overlaps = bad_start(HOLED)
        answer = exact.run(solver, task, overlaps)
        assert (task.instance.peak(answer.offsets), answer.bound, answer.is_done) == (7, 7, True)


@pytest.mark.parametrize("line", ["", "not json\n", '{"offsets": [0, 0', "Traceback\n{'a'}\n"])
def test_a_solver_that_breaks_down_says_nothing(monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    task, overlaps = bad_start(HOLED)
    monkeypatch.setattr(exact, "_lines", lambda *_: exact.whole_lines(line))
    assert exact.run("mip", task, overlaps).bound == task.bound


def test_wrong_addresses_from_a_solver_are_rebuilt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Overlapping ones, as from a solver with a tolerance: only their order counts."""
    task, overlaps = bad_start(DRAWN)
    monkeypatch.setattr(exact, "_lines", lambda *_: ['{"offsets": [0, 0, 1, 0]}\n'])
    answer = exact.run("cpsat", task, overlaps)
    assert answer.offsets.tolist() == [0, 1, 2, 0]


DRAWN = Problem(blocks((0, 4, 1), (1, 3, 1), (2, 6, 2), (4, 6, 1)))


def test_time_out_is_neither_proof_nor_impossibility() -> None:
    """HOLED needs a proof, and there is no time for one."""
    solution = solve(HOLED, time_limit_s=0.0)
    assert is_valid(HOLED, solution)
    assert solution.proof == "timed out"
    assert solution.lower_bound_bytes == 6


def test_search_that_ended_by_itself_is_feasible() -> None:
    solution = solve(HOLED, time_limit_s=60.0, exact="none")
    assert (solution.peak_bytes, solution.lower_bound_bytes, solution.proof) == (7, 6, "feasible")


def test_an_exact_solver_that_was_stopped_is_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "run", lambda _, task, __: exact.SolverAnswer(task.offsets, task.bound, is_done=False))
    solution = solve(HOLED, time_limit_s=60.0, exact="mip")
    assert (solution.peak_bytes, solution.lower_bound_bytes, solution.proof) == (7, 6, "timed out")


def test_task_travels_whole_and_keeps_time_to_answer() -> None:
    task, _ = bad_start(HOLED)
    copy = Task.from_json(task.as_json())
    assert (copy.peak, copy.bound, copy.goal, copy.end_s) == (task.peak, task.bound, task.goal, task.end_s)
    assert copy.instance.fingerprint() == task.instance.fingerprint()
    assert copy.instance.num_columns == task.instance.num_columns
    assert 0 < copy.seconds_left() <= 0.95 * 60
    assert replace(task, end_s=time.time() - 1).seconds_left() == 0


def test_the_portfolio_stops_at_its_goal() -> None:
    instance = Instance.of(HOLED)
    found = list(greedy.portfolio(instance, Overlaps(instance), goal=100, end_s=time.monotonic() + 60))
    assert len(found) == 1
    at_once = list(greedy.portfolio(instance, Overlaps(instance), instance.bound, end_s=time.monotonic()))
    assert len(at_once) == 1  # the first is finished whatever the clock says


def test_capacity_ends_the_search() -> None:
    solution = solve(replace(HOLED, capacity_bytes=7), time_limit_s=60.0)
    assert (solution.peak_bytes, solution.lower_bound_bytes, solution.proof) == (7, 6, "feasible")
    assert "CP-SAT" not in solution.seconds
    assert "MIP" not in solution.seconds


def test_capacity_that_cannot_be_met_is_shown_by_the_bound() -> None:
    assert solve(replace(HOLED, capacity_bytes=5), time_limit_s=60.0).lower_bound_bytes > 5
    pytest.importorskip("ortools")
    solution = solve(replace(HOLED, capacity_bytes=6), time_limit_s=60.0, exact="cpsat")
    assert (solution.peak_bytes, solution.lower_bound_bytes, solution.proof) == (7, 7, "optimal")


def test_nothing_and_one_block() -> None:
    assert solve(Problem(())).offsets == {}
    solution = solve(Problem((Block("only", 5, 9, 100),), alignment_bytes=64))
    assert (solution.offsets, solution.peak_bytes, solution.proof) == ({"only": 0}, 128, "optimal")


def test_every_order_fit_and_skyline_is_valid() -> None:
    chance = random.Random(7)
    for _ in range(40):
        problem = at_random(chance, chance.randint(1, 60), 40, 50, 1)
        instance = Instance.of(problem)
        overlaps = Overlaps(instance)
        found = [
            greedy.place(instance, overlaps, order, fit)
            for order in greedy.orders(instance, overlaps).values()
            for fit in greedy.FITS
        ]
        found.append(skyline.fill(instance, 1.0 + np.arange(instance.num_blocks)))
        for offsets in found:
            assert offsets is not None
            settled = greedy.settle(instance, overlaps, offsets)
            assert (settled <= offsets).all()
            for index in range(instance.num_blocks):
                near = overlaps.of(index)
                near = near[near != index]
                begin, end = offsets[index], offsets[index] + instance.sizes[index]
                assert not ((offsets[near] < end) & (begin < offsets[near] + instance.sizes[near])).any()


def test_place_gives_up_at_the_limit_and_at_the_clock() -> None:
    instance = Instance.of(HOLED)
    overlaps = Overlaps(instance)
    order = np.arange(instance.num_blocks)
    offsets = greedy.place(instance, overlaps, order, "best")
    assert offsets is not None
    peak = instance.peak(offsets)
    assert greedy.place(instance, overlaps, order, "best", limit=peak) is None
    assert greedy.place(instance, overlaps, order, "best", limit=peak + 1) is not None
    assert greedy.place(instance, overlaps, order, "best", end_s=time.monotonic() - 1) is None
    filled = skyline.fill(instance, 1.0 + order)
    assert filled is not None
    assert skyline.fill(instance, 1.0 + order, limit=instance.bound) is None
    assert skyline.fill(instance, 1.0 + order, limit=instance.peak(filled) + 1) is not None


def test_the_search_improves_on_greedy() -> None:
    """Larger than what greedy orders solve; the search starts from their peak and must find better."""
    problem = cut_rectangle(random.Random(5), 80, 200, 10_000)
    instance = Instance.of(problem)
    overlaps = Overlaps(instance)
    *_, first = greedy.portfolio(instance, overlaps, instance.bound, time.monotonic() + 60)
    found = [next(skyline.search(instance, overlaps, first.peak, instance.bound, time.monotonic() + 600))]
    peaks = [first.peak, *(each.peak for each in found)]
    assert peaks[-1] < peaks[0]
    assert peaks[-1] == instance.peak(found[-1].offsets)


def test_large_problems_are_solved_without_exact_solvers() -> None:
    chance = random.Random(9)
    shapes = [(lower, lower + chance.randint(1, 60), chance.randint(1, 1000)) for lower in range(3000)]
    problem = Problem(blocks(*shapes), alignment_bytes=512)
    solution = solve(problem, time_limit_s=60.0, exact="mip")
    assert solution.gap < 0.1
    assert set(solution.seconds) == {"greedy"}

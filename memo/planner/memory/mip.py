"""The mixed integer program of the MEMO paper (section 4.2, eq. 4 to 8), made sound. Runs in the worker.

    min M   with   A_i + S_i <= M,   A_i + S_i <= A_j + z_ij M_cap,   A_j + S_j <= A_i + (1 - z_ij) M_cap,
    z_ij in {0, 1} for all i, j alive together

In bytes it gives wrong results in practice: a solver's tolerance on z_ij times an M_cap of 1e11 is larger than any
block. Therefore addresses are counted in units such that M_cap is at most 1e5, M_cap is the best peak so far, and M is
at least the bound. The parent process makes exact addresses from the resulting order. A bound is answered only if no
size was rounded.
"""

import itertools
from dataclasses import replace
from typing import Any

import pulp

from memo.estimate.host_cpus import allowed_cpus
from memo.planner.memory.greedy import settle
from memo.planner.memory.overlaps import Overlaps
from memo.planner.memory.task import Task, answer

_MAX_PEAK = 100_000


def solve(task: Task) -> None:
    """Answer with better offsets and bounds of HiGHS, or of CBC without highspy; see memo.planner.memory.worker."""
    model = _Model(task)
    status = model.run(task.seconds_left())
    if status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):  # the parent only uses their order
        answer(offsets=[round(offset.varValue) for offset in model.offsets])
    if status == pulp.LpSolutionOptimal:
        if model.unit == 1:
            answer(bound=round(model.peak.varValue))
        answer(done=True)


class _Model:
    def __init__(self, task: Task) -> None:
        self.unit = -(-task.peak // _MAX_PEAK)
        rounded = replace(task.instance, sizes=-(-task.instance.sizes // self.unit))
        offsets = settle(rounded, Overlaps(rounded), task.offsets)
        cap, start, sizes = rounded.peak(offsets), offsets.tolist(), rounded.sizes.tolist()
        self.program = pulp.LpProblem("dsa", pulp.LpMinimize)
        self.peak = self._variable("M", min(cap, -(-task.bound // self.unit)), cap, cap)
        self.offsets = [self._variable(f"A{i}", 0, cap - sizes[i], start[i]) for i in range(len(sizes))]
        self.program += self.peak
        for offset, size in zip(self.offsets, sizes, strict=True):
            self.program += offset + size <= self.peak
        pairs = _pairs(task)
        # A plan turned upside down is also a plan, so the order of one pair, the largest, may be fixed.
        fixed = max(pairs, key=lambda pair: sizes[pair[0]] + sizes[pair[1]], default=None)
        for i, j in pairs:
            above = int(start[i] > start[j])
            z = self._variable(f"z{i}_{j}", above if (i, j) == fixed else 0, above if (i, j) == fixed else 1, above)
            self.program += self.offsets[i] + sizes[i] <= self.offsets[j] + cap * z
            self.program += self.offsets[j] + sizes[j] <= self.offsets[i] + cap - cap * z

    def _variable(self, name: str, lowest: int, highest: int, start: int) -> Any:
        variable = self.program.add_variable(name, lowest, highest, cat=pulp.LpInteger)
        variable.setInitialValue(start)
        return variable

    def run(self, limit_s: float) -> int:
        """Solve for about `limit_s`; returns the status of the solution, as that of the problem is also "optimal" if
        the time is up."""
        num_threads = len(allowed_cpus())
        # Peaks are whole units, so an improvement of less than one unit is none.
        options = {"msg": False, "timeLimit": limit_s, "threads": num_threads, "gapAbs": 0.99, "gapRel": 0.0}
        has_highs = pulp.HiGHS().available()
        self.program.solve(_warm_highs(**options) if has_highs else pulp.PULP_CBC_CMD(warmStart=True, **options))
        status: int = self.program.sol_status
        return status


def _warm_highs(**options: Any) -> Any:
    """pulp.HiGHS with start values, which it ignores by itself; they are set after the model is built."""
    import highspy

    class WarmHiGHS(pulp.HiGHS):
        def callSolver(self, lp: Any) -> None:
            start = highspy.HighsSolution()
            start.col_value = [variable.varValue for variable in lp.variables()]
            lp.solverModel.setSolution(start)
            super().callSolver(lp)

    return WarmHiGHS(**options)


def _pairs(task: Task) -> list[tuple[int, int]]:
    lower, upper = task.instance.lower, task.instance.upper
    return [(i, j) for i, j in itertools.combinations(range(len(lower)), 2) if lower[j] < upper[i]]

"""The mixed integer program of the MEMO paper (section 4.2, eq. 4 to 8), made sound, through PuLP and HiGHS.

    min M   with   A_i + S_i <= M,   A_i + S_i <= A_j + z_ij M_cap,   A_j + S_j <= A_i + (1 - z_ij) M_cap,
    z_ij in {0, 1} for all i, j alive together

In bytes it gives wrong results in practice: a solver's tolerance on z_ij times an M_cap of 1e11 is larger than any
block. Therefore addresses are counted in units such that M_cap is at most 1e5, M_cap is the best peak so far, and M is
at least the bound. Exact addresses are made from the resulting order. A bound is stated only if no size was rounded.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import highspy
import numpy as np
import pulp

from memo.estimate.host_cpus import allowed_cpus
from memo.planner.memory.dsa import Instance, Ints
from memo.planner.memory.greedy import settle
from memo.planner.memory.overlaps import Overlaps

_MAX_PEAK = 100_000


class Answer(NamedTuple):
    """Offsets in units (the given ones if no better ones were found), a proven bound, and whether the search ended."""

    offsets: Ints
    bound: int
    is_done: bool


def improve(instance: Instance, overlaps: Overlaps, offsets: Ints, bound: int, limit_s: float) -> Answer:
    """Look for about `limit_s` for a lower peak than that of `offsets`; `bound` is a proven bound of the peak.

    Everything is in the units of `instance`.
    """
    model = _Model(instance, offsets, bound)
    status = model.run(limit_s)
    if status in (pulp.LpSolutionOptimal, pulp.LpSolutionIntegerFeasible):
        found = settle(instance, overlaps, model.order())
        offsets = min(offsets, found, key=instance.peak)
    is_done = status == pulp.LpSolutionOptimal
    if is_done and model.unit == 1:
        bound = max(bound, round(model.peak.varValue))
    return Answer(offsets, min(bound, instance.peak(offsets)), is_done)


class _Model:
    def __init__(self, instance: Instance, offsets: Ints, bound: int) -> None:
        self.unit = -(-instance.peak(offsets) // _MAX_PEAK)
        rounded = replace(instance, sizes=-(-instance.sizes // self.unit))
        offsets = settle(rounded, Overlaps(rounded), offsets)
        cap, start, sizes = rounded.peak(offsets), offsets.tolist(), rounded.sizes.tolist()
        self.program = pulp.LpProblem("dsa", pulp.LpMinimize)
        self.peak = self._variable("M", min(cap, -(-bound // self.unit)), cap, cap)
        self.offsets = [self._variable(f"A{i}", 0, cap - sizes[i], start[i]) for i in range(len(sizes))]
        self.program += self.peak
        for offset, size in zip(self.offsets, sizes, strict=True):
            self.program += offset + size <= self.peak
        lower, upper = instance.lower, instance.upper
        pairs = [(i, j) for i, j in itertools.combinations(range(len(sizes)), 2) if lower[j] < upper[i]]
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
        """Run HiGHS and return the status of the solution; the status of the problem is "optimal" even if the time is
        up."""
        # Peaks are whole units, so an improvement of less than one unit is none.
        options = {"timeLimit": limit_s, "threads": len(allowed_cpus()), "gapAbs": 0.99, "gapRel": 0.0}
        self.program.solve(_WarmHiGHS(msg=False, **options))
        status: int = self.program.sol_status
        return status

    def order(self) -> Ints:
        """Offsets that HiGHS found. Only their order counts: its tolerance lets blocks overlap a little."""
        return np.array([round(offset.varValue) for offset in self.offsets], dtype=np.int64)


class _WarmHiGHS(pulp.HiGHS):
    """pulp.HiGHS with start values, which it ignores by itself; they are set after the model is built."""

    def callSolver(self, lp: Any) -> None:
        start = highspy.HighsSolution()
        start.col_value = [variable.varValue for variable in lp.variables()]
        lp.solverModel.setSolution(start)
        super().callSolver(lp)

"""CP-SAT of OR-tools: blocks as rectangles of time and address that do not overlap. Runs in the worker."""

import math
from typing import Any

from ortools.sat.python import cp_model

from memo.estimate.host_cpus import allowed_cpus
from memo.planner.memory.task import Task, answer

_FIRST_SHARE = 0.5
"""Share of the time for the question whether the goal can be met, which is easier than finding the lowest peak."""
_MIN_WORKERS = 8
"""Each worker of CP-SAT has another strategy: on 2 cores, 8 workers answer within seconds and 2 not within 20."""


def solve(task: Task) -> None:
    """Answer with better offsets and bounds; see memo.planner.memory.worker."""
    status = _Model(task, task.goal).run(_FIRST_SHARE * task.seconds_left())
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        answer(done=True)
        return
    bound = task.bound
    if status == cp_model.INFEASIBLE:
        bound = task.goal + 1
        answer(bound=bound)
    if bound < task.peak:
        status = _Model(task, task.peak - 1, lowest=bound).run(task.seconds_left())
    if bound >= task.peak or status == cp_model.INFEASIBLE:
        answer(bound=task.peak)
    if bound >= task.peak or status in (cp_model.INFEASIBLE, cp_model.OPTIMAL):
        answer(done=True)


class _Model:
    """A model for offsets with a peak of at most `highest`; with `lowest`, it minimises the peak from there on."""

    def __init__(self, task: Task, highest: int, lowest: int | None = None) -> None:
        instance = task.instance
        sizes, lower, upper = (values.tolist() for values in (instance.sizes, instance.lower, instance.upper))
        self.model = cp_model.CpModel()
        self.offsets = [self.model.new_int_var(0, highest - size, "") for size in sizes]
        lives = [self.model.new_fixed_size_interval_var(a, b - a, "") for a, b in zip(lower, upper, strict=True)]
        places = [
            self.model.new_fixed_size_interval_var(offset, size, "")
            for offset, size in zip(self.offsets, sizes, strict=True)
        ]
        self.model.add_no_overlap_2d(lives, places)
        self.has_objective = lowest is not None
        peak: Any = highest
        if lowest is not None:
            peak = self.model.new_int_var(lowest, highest, "")
            for offset, size in zip(self.offsets, sizes, strict=True):
                self.model.add(offset + size <= peak)
            self.model.minimize(peak)
            for offset, value in zip(self.offsets, task.offsets.tolist(), strict=True):
                self.model.add_hint(offset, value)
        self.model.add_cumulative(lives, sizes, peak)  # redundant, but it speeds up the search

    def run(self, limit_s: float) -> cp_model.CpSolverStatus:
        """Run CP-SAT for at most `limit_s` and answer what it finds meanwhile; returns its status."""
        solver = cp_model.CpSolver()
        solver.parameters.max_time_in_seconds = max(0.01, limit_s)
        solver.parameters.num_workers = max(_MIN_WORKERS, len(allowed_cpus()))
        status = solver.solve(self.model, _Report(self.offsets))
        if self.has_objective and status in (cp_model.OPTIMAL, cp_model.FEASIBLE, cp_model.UNKNOWN):
            answer(bound=math.ceil(solver.best_objective_bound - 1e-6))
        return status


class _Report(cp_model.CpSolverSolutionCallback):
    def __init__(self, offsets: list[cp_model.IntVar]) -> None:
        super().__init__()
        self._offsets = offsets

    def on_solution_callback(self) -> None:
        answer(offsets=[self.value(offset) for offset in self._offsets])

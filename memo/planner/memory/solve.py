"""Addresses for one problem: bound, greedy orders, local search, mixed integer program, until one is good enough."""

import time
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from memo.artifacts.memory_plan import Proof
from memo.planner.memory import greedy, skyline
from memo.planner.memory.dsa import Instance, Problem, Solution
from memo.planner.memory.greedy import NO_LIMIT, Found
from memo.planner.memory.overlaps import Overlaps
from memo.planner.memory.validator import validate

TIME_LIMIT_S = 10.0
_GREEDY_SHARE = 0.5
_SEARCH_SHARE = 0.2
"""Share of the time for the local search if the MIP comes after it; else the search has all the time that is left."""
_MAX_MIP_PAIRS = 500
"""The most pairs of blocks alive together for which the MIP is useful: with 900, HiGHS finds nothing better than a
greedy order in 20 s."""


def solve(problem: Problem, time_limit_s: float = TIME_LIMIT_S) -> Solution:
    """The best addresses found in `time_limit_s`; the first greedy order is always finished.

    The search ends as soon as the peak equals the lower bound (then it is optimal) or fits into the capacity. A peak
    above the capacity is no error: the caller must compare it, and the bound to know whether any plan can fit.
    """
    instance = Instance.of(problem)
    enough_bytes = problem.capacity_bytes or 0
    goal = max(instance.bound, enough_bytes // instance.unit_bytes)
    run = _Run(instance, goal, time.monotonic() + time_limit_s)
    if instance.num_blocks:
        run.solve()
    unit_bytes = instance.unit_bytes
    offsets = (run.best.offsets * unit_bytes).tolist()
    solution = Solution(
        offsets=dict(zip(instance.ids, offsets, strict=True)),
        peak_bytes=run.best.peak * unit_bytes,
        lower_bound_bytes=run.bound * unit_bytes,
        proof=run.proof(),
        solver=run.best.solver,
        seconds=run.seconds,
    )
    validate(replace(problem, capacity_bytes=None), solution)
    return solution


class _Run:
    """The best placement so far, in units, and what is proven about it."""

    def __init__(self, instance: Instance, goal: int, end_s: float) -> None:
        self.instance, self.goal, self.end_s = instance, goal, end_s
        self.overlaps = Overlaps(instance)
        self.bound = instance.bound
        self.best = Found(np.zeros(instance.num_blocks, dtype=np.int64), 0, "nothing to place")
        self.is_cut_short = False
        self.seconds: dict[str, float] = {}

    def solve(self) -> None:
        instance = self.instance
        self.best = self.best._replace(peak=NO_LIMIT)
        end_s = self._until(_GREEDY_SHARE)
        self._take("greedy", greedy.portfolio(instance, self.overlaps, self.goal, end_s), end_s)
        asks_mip = instance.num_pairs() <= _MAX_MIP_PAIRS
        if not self.is_done and instance.num_blocks <= skyline.MAX_BLOCKS:
            end_s = self._until(_SEARCH_SHARE if asks_mip else 1.0)
            found = skyline.search(instance, self.overlaps, self.best.peak, self.goal, end_s)
            self._take("search", found, end_s)
        if not self.is_done and asks_mip:
            self._ask_mip()

    @property
    def is_done(self) -> bool:
        return self.best.peak <= max(self.goal, self.bound)

    def proof(self) -> Proof:
        if self.best.peak == self.bound:
            return "optimal"
        return "timed out" if self.is_cut_short and not self.is_done else "feasible"

    def _until(self, share: float) -> float:
        """The time.monotonic() at which `share` of the time that is left will have passed."""
        now_s = time.monotonic()
        return now_s + share * max(0.0, self.end_s - now_s)

    def _take(self, name: str, found: Iterable[Found], end_s: float) -> None:
        """Keep the last one of `found`, each of which is better than the one before."""
        start_s = time.monotonic()
        for self.best in found:
            pass
        self.seconds[name] = time.monotonic() - start_s
        self.is_cut_short |= time.monotonic() >= end_s

    def _ask_mip(self) -> None:
        from memo.planner.memory import mip  # importing PuLP and HiGHS takes longer than most problems

        start_s = time.monotonic()
        limit_s = max(0.0, self.end_s - start_s)
        answer = mip.improve(self.instance, self.overlaps, self.best.offsets, self.bound, limit_s)
        peak = self.instance.peak(answer.offsets)
        if peak < self.best.peak:
            self.best = Found(answer.offsets, peak, "MIP")
        self.bound = answer.bound
        self.seconds["MIP"] = time.monotonic() - start_s
        self.is_cut_short |= not answer.is_done

"""Addresses for one problem, by bound, greedy orders, skyline orders, local search and mixed integer program.

Search and program first get only the blocks that are alive while much memory is. These determine the peak, and are far
fewer.
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from operator import attrgetter

import numpy as np

from memo.artifacts.memory_plan import Proof
from memo.planner.memory import greedy, skyline
from memo.planner.memory.dsa import Instance, Ints, Problem, Solution
from memo.planner.memory.greedy import NO_LIMIT, Found
from memo.planner.memory.overlaps import Overlaps
from memo.planner.memory.validator import validate

TIME_LIMIT_S = 20.0
_GREEDY_SHARE = 0.5
_SEARCH_SHARE = 0.3
"""Share of the time for the local search if the MIP comes after it; else the search has all the time that is left."""
_BUSY_SHARE = 0.8
"""Share of the time for the blocks that are alive while much memory is; then all are searched."""
_MAX_MIP_PAIRS = 700
"""The most pairs of blocks alive together for which the MIP is useful: with 664 it took 2 s to a peak that the search
did not find in 60; with 900, HiGHS finds nothing better than a greedy order in 20 s."""


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


_Improve = Callable[[Instance, Overlaps, Found, float], Found]
"""(blocks, which of them live together, their placement, when to end) -> the placement or a lower one."""
_peak = attrgetter("peak")


class _Run:
    """The best placement so far, in units, and what is proven about it."""

    def __init__(self, instance: Instance, goal: int, end_s: float) -> None:
        self.instance, self.goal, self.end_s = instance, goal, end_s
        self.overlaps = Overlaps(instance)
        self.bound = instance.bound
        peak = NO_LIMIT if instance.num_blocks else 0
        self.best = Found(np.zeros(instance.num_blocks, dtype=np.int64), peak, "nothing to place")
        self.is_cut_short = False
        self.seconds: dict[str, float] = {}

    def solve(self) -> None:
        instance = self.instance
        end_s = self._until(_GREEDY_SHARE, self.end_s)
        found = greedy.portfolio(instance, self.overlaps, self.goal, end_s)
        self.best = self._last("greedy", self.best, islice(found, 1), end_s)
        busy = instance.busy()
        if not self.is_done and len(busy) <= skyline.MAX_BLOCKS_FILLED:
            self._improve(busy, self._filled, self._until(_BUSY_SHARE, self.end_s))
        if not self.is_done:
            self.best = min(self.best, self._last("greedy", self.best, found, end_s), key=_peak)
        if not self.is_done and len(busy) < instance.num_blocks:
            self._improve(busy, self._searched, self._until(_BUSY_SHARE, self.end_s))
        if not self.is_done:
            self._improve(np.arange(instance.num_blocks), self._searched, self.end_s)

    @property
    def is_done(self) -> bool:
        return self.best.peak <= max(self.goal, self.bound)

    def proof(self) -> Proof:
        if self.best.peak == self.bound:
            return "optimal"
        return "timed out" if self.is_cut_short and not self.is_done else "feasible"

    def _improve(self, blocks: Ints, by: _Improve, end_s: float) -> None:
        """Look until about `end_s` for lower addresses of these blocks; the others are then placed around them."""
        part, offsets = self.instance.part(blocks), self.best.offsets[blocks]
        before = Found(offsets, part.peak(offsets), self.best.solver)
        best = by(part, Overlaps(part), before, end_s)
        if best.peak < min(before.peak, self.best.peak):
            offsets = greedy.around(self.instance, self.overlaps, blocks, best.offsets)
            self.best = min(self.best, Found(offsets, self.instance.peak(offsets), best.solver), key=_peak)

    def _filled(self, part: Instance, overlaps: Overlaps, best: Found, end_s: float) -> Found:
        return self._last("skyline", best, skyline.fills(part, overlaps, best.peak, self.goal, end_s), end_s)

    def _searched(self, part: Instance, overlaps: Overlaps, best: Found, end_s: float) -> Found:
        asks_mip = part.num_pairs() <= _MAX_MIP_PAIRS
        if part.num_blocks <= skyline.MAX_BLOCKS:
            search_end_s = self._until(_SEARCH_SHARE, end_s) if asks_mip else end_s
            found = skyline.search(part, overlaps, best.peak, self.goal, search_end_s)
            best = self._last("search", best, found, search_end_s)
        if asks_mip and best.peak > max(self.goal, self.bound):
            best = self._ask_mip(part, overlaps, best, end_s)
        return best

    @staticmethod
    def _until(share: float, end_s: float) -> float:
        """The time.monotonic() at which `share` of the time until `end_s` will have passed."""
        now_s = time.monotonic()
        return now_s + share * max(0.0, end_s - now_s)

    def _last(self, name: str, best: Found, found: Iterable[Found], end_s: float) -> Found:
        """The last one of `found`, each of which is better than the one before and than `best`; `best` if there is
        none."""
        start_s = time.monotonic()
        for better in found:
            best = better
        self._took(name, start_s)
        self.is_cut_short |= time.monotonic() >= end_s
        return best

    def _ask_mip(self, part: Instance, overlaps: Overlaps, best: Found, end_s: float) -> Found:
        from memo.planner.memory import mip  # importing PuLP and HiGHS takes longer than most problems

        start_s = time.monotonic()
        answer = mip.improve(part, overlaps, best.offsets, self.bound, max(0.0, end_s - start_s))
        peak = part.peak(answer.offsets)
        self.bound = answer.bound  # what these blocks need at least, all need
        self._took("MIP", start_s)
        self.is_cut_short |= not answer.is_done
        return Found(answer.offsets, peak, "MIP") if peak < best.peak else best

    def _took(self, name: str, start_s: float) -> None:
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start_s

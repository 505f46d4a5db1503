"""Addresses for a whole iteration: in two levels (memo.planner.memory.levels), or all at once.

Requests that outlive the iteration are left to the native allocator, and so are those below min_bytes.
"""

import time
from dataclasses import dataclass, replace
from typing import Literal

from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import Trace
from memo.errors import PlanError
from memo.planner.memory.iteration import Iteration, Placed, SolvedProblem
from memo.planner.memory.levels import Sections, in_two_levels
from memo.planner.memory.plan_check import check_memory_plan
from memo.planner.memory.repeats import repeated_phases, without_phases
from memo.planner.memory.solve import TIME_LIMIT_S
from memo.units import MIB

Planner = Literal["auto", "paper", "flat"]
ALIGNMENT_BYTES = 512
"""The alignment of PyTorch's CUDA allocator."""

_FLAT_SHARE = 0.6
"""Share of the time that is left after the two levels for planning all requests at once."""
_MAX_CROSSING = 6000
"""The most requests of level 2; with more of them level 2 takes as long as planning all requests at once."""
_MAX_AT_ONCE = 200_000
"""The most requests that `auto` also plans all at once: one order of 160,000 takes 2 s on one core of an AMD EPYC."""


@dataclass(frozen=True)
class Planning:
    """A plan, and the problems that were solved for it."""

    plan: MemoryPlan
    parts: tuple[SolvedProblem, ...]


def solve_trace(
    trace: Trace,
    planner: Planner = "auto",
    min_bytes: int = MIB,
    alignment_bytes: int = ALIGNMENT_BYTES,
    time_limit_s: float = TIME_LIMIT_S,
) -> Planning:
    """Addresses for all requests of at least `min_bytes` that are freed within the iteration, checked.

    Args:
        planner: "paper" plans in two levels, "flat" all at once. "auto" plans in two levels and, until a plan meets the
            lower bound, all at once, unless requests are too many, and with phases cut into sections; it takes the
            plan with the lowest peak, and `plan.planner` is "paper", "flat" or "sections".
        time_limit_s: as in `solve`, for all problems together.

    Raises TraceError as `check_trace`, PlanError for `min_bytes` below 1.
    """
    if min_bytes < 1:
        raise PlanError(f"min_bytes is {min_bytes}, but requests have 1 byte or more: give 1 to plan them all")
    whole = iteration = Iteration.of(trace, min_bytes, alignment_bytes, time_limit_s)
    repeats = repeated_phases(trace, {request.id for request in whole.served})
    if repeats:
        iteration = Iteration.of(without_phases(trace, repeats), min_bytes, alignment_bytes, time_limit_s)
    if planner == "flat":
        found = _all_at_once(iteration)
    elif planner == "paper":
        found = in_two_levels(iteration, Sections.phases(iteration).split(iteration)).placed(iteration.bound_bytes)
    else:
        found = _whichever_is_better(iteration)
    plan = whole.plan(found, repeats)
    check_memory_plan(plan, trace)
    return Planning(plan, found.parts)


def _whichever_is_better(iteration: Iteration) -> Placed:
    levels = in_two_levels(iteration, Sections.phases(iteration).split(iteration))
    at_once: tuple[SolvedProblem, ...] = ()
    best = levels.placed(iteration.bound_bytes)
    if best.proof != "optimal" and len(iteration.served) <= _MAX_AT_ONCE:
        flat = _all_at_once(iteration, _FLAT_SHARE)
        better, at_once = min(best, flat, key=lambda found: found.peak_bytes), flat.parts
        best = replace(better, bound_bytes=flat.bound_bytes, parts=best.parts + at_once)  # a solver may have raised it
    while best.proof != "optimal" and time.monotonic() < iteration.end_s:
        split = levels.finer(best.bound_bytes).split(iteration)
        if split.sections == levels.split.sections or len(split.crossing) > _MAX_CROSSING:
            break
        levels = in_two_levels(iteration, split)
        if levels.peak_bytes < best.peak_bytes:
            best = replace(levels.placed(best.bound_bytes), parts=levels.parts + at_once)
    return best


def _all_at_once(iteration: Iteration, share: float = 1.0) -> Placed:
    solution = iteration.solve(iteration.flat_problem(), share)
    part = SolvedProblem("all at once", len(iteration.trace.phases), len(iteration.served), solution)
    offsets = {request.id: solution.offsets[request.id] for request in iteration.served}
    return Placed("flat", offsets, solution.peak_bytes, solution.lower_bound_bytes, (part,))

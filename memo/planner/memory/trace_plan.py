"""Addresses for a whole iteration: in two levels (MEMO paper, section 4.2 and Figure 8), or all at once.

    address                               level 1   The requests that one phase both makes and frees are a problem
       |        +-----------------+                 of their own, solved once for all phases with the same requests.
       |        |  kept by F 0    |                 Its peak is the size of the phase's arena.
       | +-----+| +-----+ +-----+ |       level 2   One block for each phase's arena, from its first request to its
       | |arena|| |arena| |arena| |                 last free, and all requests that live on into another phase.
       +---F 0-----F 1-----B 1-----> time

Requests that outlive the iteration are left to the native allocator, and so are those below min_bytes.

An arena is reserved for the whole of its phase, even after a request from an earlier phase is freed in it. If that
determines the peak, "auto" cuts the phase into sections with an arena each.
"""

import time
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Literal

from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedPhase, PlannedRequest
from memo.artifacts.memory_trace import ATTENTION, Request, Trace, requests
from memo.errors import PlanError
from memo.planner.memory.dsa import Block, Instance, Problem, Solution, lower_bound_bytes
from memo.planner.memory.plan_check import check_memory_plan
from memo.planner.memory.repeats import repeated_phases, without_phases
from memo.planner.memory.solve import TIME_LIMIT_S, solve
from memo.units import MIB

Planner = Literal["auto", "paper", "flat"]
ALIGNMENT_BYTES = 512
"""The alignment of PyTorch's CUDA allocator."""

_PAPER_SHARE = 0.7
"""Share of the time that `auto` gives to the two levels."""

_FEW = 1000
"""Sections with at most this many requests are opened, so that level 2 plans their requests; others are cut."""
_MAX_CROSSING = 6000
"""The most requests of level 2; with more of them level 2 takes as long as planning all requests at once."""


@dataclass(frozen=True)
class SolvedProblem:
    """One problem that was solved for a plan: its name, its number of phases and of blocks, and its solution."""

    name: str
    num_phases: int
    num_blocks: int
    solution: Solution


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
        planner: "paper" plans in two levels, "flat" all at once. "auto" plans in two levels and, if that does not meet
            the lower bound, also with phases cut into sections and all at once; it takes the plan with the lowest
            peak, and `plan.planner` is "paper", "sections" or "flat".
        time_limit_s: as in `solve`, for all problems together.

    Raises TraceError as `check_trace`, PlanError for `min_bytes` below 1.
    """
    if min_bytes < 1:
        raise PlanError(f"min_bytes is {min_bytes}, but requests have 1 byte or more: give 1 to plan them all")
    whole = _Iteration.of(trace, min_bytes, alignment_bytes, time_limit_s)
    repeats = repeated_phases(trace, {request.id for request in whole.served})
    short = without_phases(trace, repeats)
    iteration = _Iteration.of(short, min_bytes, alignment_bytes, time_limit_s)
    if planner == "flat":
        planning = _all_at_once(iteration)
    elif planner == "paper":
        planning = _in_two_levels(iteration, _Sections.phases(iteration))
    else:
        planning = _whichever_is_better(iteration, time_limit_s)
    planning = replace(planning, plan=whole.repeating(planning.plan, repeats))
    check_memory_plan(planning.plan, trace)
    return planning


@dataclass(frozen=True)
class _Iteration:
    """The iteration to plan, the options, and the time.monotonic() at which planning must end."""

    trace: Trace
    requests: tuple[Request, ...]
    """The requests of at least min_bytes, in order."""
    min_bytes: int
    alignment_bytes: int
    end_s: float
    arenas: dict[tuple[bytes, ...], Solution] = field(default_factory=dict)
    """The addresses for the requests of a section, by their fingerprint: finer sections leave most as they are."""

    @classmethod
    def of(cls, trace: Trace, min_bytes: int, alignment_bytes: int, time_limit_s: float) -> "_Iteration":
        planned = tuple(request for request in requests(trace) if request.num_bytes >= min_bytes)
        return cls(trace, planned, min_bytes, alignment_bytes, time.monotonic() + time_limit_s)

    @property
    def served(self) -> list[Request]:
        """The requests that get an address."""
        return [request for request in self.requests if request.freed_in is not None]

    def problem(self, blocks: Iterable[Block]) -> Problem:
        return Problem(tuple(blocks), alignment_bytes=self.alignment_bytes)

    def flat_problem(self) -> Problem:
        return self.problem(Block(r.id, r.lower, r.upper, r.num_bytes) for r in self.served)

    def solve(self, problem: Problem, share: float = 1.0) -> Solution:
        """Solve a problem in `share` of the time that is left."""
        return solve(problem, share * max(0.0, self.end_s - time.monotonic()))

    def plan(self, planner: str, offsets: Mapping[int, int], arena_bytes: int, bound_bytes: int) -> MemoryPlan:
        """A plan from `offsets`, the address of each served request by id. `_judged` corrects its proof."""
        by_phase: list[list[PlannedRequest]] = [[] for _ in self.trace.phases]
        made = [request.lower for request in self.requests]
        for request in self.requests:
            if request.freed_in is None:
                planned = PlannedRequest(request.num_bytes, NATIVE)
            else:
                planned = PlannedRequest(request.num_bytes, offsets[request.id], bisect_left(made, request.upper))
            by_phase[request.phase].append(planned)
        return MemoryPlan(
            device=self.trace.device,
            planner=planner,
            alignment_bytes=self.alignment_bytes,
            min_bytes=self.min_bytes,
            arena_bytes=arena_bytes,
            lower_bound_bytes=bound_bytes,
            proof="feasible",
            phases=tuple(
                PlannedPhase(phase.kind, phase.layer, phase.microbatch, tuple(planned))
                for phase, planned in zip(self.trace.phases, by_phase, strict=True)
            ),
        )

    def repeating(self, plan: MemoryPlan, repeats: Mapping[int, int]) -> MemoryPlan:
        """The plan of the whole iteration from `plan`, which lacks the phases that repeat others."""
        made = iter(plan.phases)
        phases: list[PlannedPhase] = []
        for index in range(len(self.trace.phases)):
            phases.append(phases[repeats[index]] if index in repeats else next(made))
        found = (request for phase in phases for request in phase.requests)
        offsets = {request.id: planned.offset_bytes for request, planned in zip(self.requests, found, strict=True)}
        repeated = self.plan(plan.planner, offsets, plan.arena_bytes, plan.lower_bound_bytes)
        return replace(repeated, proof=plan.proof)


def _whichever_is_better(iteration: _Iteration, time_limit_s: float) -> Planning:
    first = replace(iteration, end_s=iteration.end_s - (1 - _PAPER_SHARE) * time_limit_s)
    sections = _Sections.phases(iteration)
    planning = _in_two_levels(first, sections)
    while planning.plan.proof != "optimal" and time.monotonic() < first.end_s:
        finer = sections.finer(iteration, planning.plan.lower_bound_bytes)
        if finer == sections or len(finer.split(iteration)[1]) > _MAX_CROSSING:
            break
        sections = finer
        planning = min(planning, _in_two_levels(first, sections), key=lambda found: found.plan.arena_bytes)
    if planning.plan.proof == "optimal":
        return planning
    flat = _all_at_once(iteration)
    better = min(planning.plan, flat.plan, key=lambda plan: plan.arena_bytes)
    better = replace(better, lower_bound_bytes=flat.plan.lower_bound_bytes)  # a solver may have raised it
    return _judged(better, planning.parts + flat.parts)


@dataclass(frozen=True)
class _Sections:
    """Where the arenas of level 1 begin, in numbers of events; opened sections have no arena.

    At first the sections are the phases. A section is cut at the beginnings and ends of requests that cross its border,
    because the memory of such a request is free for a part of the phase, which one arena for the whole phase could not
    use. Or it is opened, so that level 2 plans all its requests.
    """

    starts: tuple[int, ...]
    opened: frozenset[int] = frozenset()
    """The starts of the opened sections."""
    planner: str = "paper"

    @classmethod
    def phases(cls, iteration: _Iteration) -> "_Sections":
        """A section for each phase. A phase that marks of attention cut in parts is one section together with these
        marks."""
        phases = iteration.trace.phases
        ends = accumulate(len(phase.events) for phase in phases)
        is_cut_out = (ATTENTION in (before.kind, phase.kind) for before, phase in pairwise(phases))
        starts = zip((0, *ends), (False, *is_cut_out), strict=False)
        return cls(tuple(start for start, cut_out in starts if not cut_out))

    def start_of(self, event: int) -> int:
        return self.starts[bisect_right(self.starts, event) - 1]

    def split(self, iteration: _Iteration) -> tuple[dict[int, list[Request]], list[Request]]:
        """(requests of level 1 by the start of their section, requests of level 2)."""
        inner: dict[int, list[Request]] = defaultdict(list)
        crossing: list[Request] = []
        for request in iteration.served:
            start = self.start_of(request.lower)
            is_inner = start == self.start_of(request.upper) and start not in self.opened
            (inner[start] if is_inner else crossing).append(request)
        return inner, crossing

    def finer(self, iteration: _Iteration, bound_bytes: int) -> "_Sections":
        """The sections that determine the peak are opened if they have few requests, else cut; others stay."""
        inner, crossing = self.split(iteration)
        deciding = _deciding(iteration, inner, crossing, bound_bytes)
        edges = {edge for request in crossing for edge in (request.lower, request.upper)}
        cuts = {edge for edge in edges if self.start_of(edge) in deciding} - set(self.starts)
        if cuts and sum(len(inner[start]) for start in deciding) > _FEW:
            return replace(self, starts=tuple(sorted({*self.starts, *cuts})), planner="sections")
        return replace(self, opened=self.opened | deciding, planner="sections" if deciding else self.planner)


def _deciding(
    iteration: _Iteration, inner: Mapping[int, list[Request]], crossing: Iterable[Request], bound_bytes: int
) -> frozenset[int]:
    """Starts of the sections during which arenas and requests of level 2 together exceed `bound_bytes`."""
    changes = [(request.lower, request.num_bytes, -1) for request in crossing]
    changes += [(request.upper, -request.num_bytes, -1) for request in crossing]
    for start, found in inner.items():
        arena_bytes = lower_bound_bytes(iteration.problem(_blocks(found)))
        changes.append((found[0].lower, arena_bytes, start))
        changes.append((max(request.upper for request in found), -arena_bytes, start))
    deciding: set[int] = set()
    here: set[int] = set()
    live = 0
    for _, change, start in sorted(changes):  # at one moment ends come before beginnings
        live += change
        if start >= 0:
            (here.add if change > 0 else here.discard)(start)
        if live > bound_bytes:
            deciding |= here
    return frozenset(deciding)


def _all_at_once(iteration: _Iteration) -> Planning:
    solution = iteration.solve(iteration.flat_problem())
    offsets = {request.id: solution.offsets[request.id] for request in iteration.served}
    plan = iteration.plan("flat", offsets, solution.peak_bytes, solution.lower_bound_bytes)
    return _judged(plan, (SolvedProblem("all at once", len(plan.phases), len(offsets), solution),))


def _blocks(found: Iterable[Request]) -> Iterable[Block]:
    return (Block(rank, request.lower, request.upper, request.num_bytes) for rank, request in enumerate(found))


def _in_two_levels(iteration: _Iteration, sections: _Sections) -> Planning:
    inner, crossing = sections.split(iteration)
    arenas, parts = _solve_sections(iteration, inner)
    blocks = [Block(request.id, request.lower, request.upper, request.num_bytes) for request in crossing]
    for start, found in inner.items():
        lower, upper = found[0].lower, max(request.upper for request in found)
        blocks.append(Block(_arena(start), lower, upper, arenas[start].peak_bytes))
    whole = iteration.solve(iteration.problem(blocks))
    offsets = {request.id: whole.offsets[request.id] for request in crossing}
    for start, found in inner.items():
        begin = whole.offsets[_arena(start)]
        offsets.update({request.id: begin + arenas[start].offsets[rank] for rank, request in enumerate(found)})
    bound_bytes = lower_bound_bytes(iteration.flat_problem())
    plan = iteration.plan(sections.planner, offsets, whole.peak_bytes, bound_bytes)
    top = SolvedProblem("arenas and what crosses phases", len(plan.phases), len(blocks), whole)
    return _judged(plan, (*parts, top))


def _arena(start: int) -> str:
    return f"arena at {start}"


def _solve_sections(
    iteration: _Iteration, inner: Mapping[int, list[Request]]
) -> tuple[dict[int, Solution], tuple[SolvedProblem, ...]]:
    """{start of a section: addresses of its inner requests by number}, and the problems solved; sections with the same
    requests share a solution."""
    alike: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    problems: dict[tuple[bytes, ...], Problem] = {}
    for start, found in inner.items():
        problem = iteration.problem(_blocks(found))
        key = Instance.of(problem).fingerprint()
        problems.setdefault(key, problem)
        alike[key].append(start)
    arenas, parts = {}, []
    for index, (key, starts) in enumerate(alike.items()):
        if key not in iteration.arenas:
            share = 1 / (len(alike) - index + 1)  # level 2 gets the last share
            iteration.arenas[key] = iteration.solve(problems[key], share)
        solution = iteration.arenas[key]
        arenas.update(dict.fromkeys(starts, solution))
        kind = iteration.trace.phases[inner[starts[0]][0].phase].kind
        parts.append(SolvedProblem(kind, len(starts), len(problems[key].blocks), solution))
    return arenas, tuple(parts)


def _judged(plan: MemoryPlan, parts: tuple[SolvedProblem, ...]) -> Planning:
    """The plan with its proof: optimal if it meets its bound, else timed out if one of its problems was."""
    if plan.arena_bytes == plan.lower_bound_bytes:
        return Planning(replace(plan, proof="optimal"), parts)
    is_cut_short = any(part.solution.proof == "timed out" for part in parts)
    return Planning(replace(plan, proof="timed out" if is_cut_short else "feasible"), parts)

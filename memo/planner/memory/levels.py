"""Addresses in two levels (MEMO paper, section 4.2 and Figure 8).

    address                               level 1   The requests that one phase both makes and frees are a problem
       |        +-----------------+                 of their own, solved once for all phases with the same requests.
       |        |  kept by F 0    |                 Its peak is the size of the phase's arena.
       | +-----+| +-----+ +-----+ |       level 2   One block for each phase's arena, from its first request to its
       | |arena|| |arena| |arena| |                 last free, and all requests that live on into another phase.
       +---F 0-----F 1-----B 1-----> time

An arena is reserved for the whole of its phase, even after a request from an earlier phase is freed in it. If that
determines the peak, a phase may be cut into sections with an arena each.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from memo.artifacts.memory_trace import ATTENTION, Request
from memo.planner.memory.dsa import Block, Instance, Problem, Solution
from memo.planner.memory.iteration import Iteration, Placed, SolvedProblem, block_of

_FEW = 1000
"""Sections with at most this many requests are opened, so that level 2 plans their requests; others are cut."""
_SECTION_SHARE = 0.5
"""Share of the time that is left for each problem of level 1. Most take next to none."""


class Split(NamedTuple):
    """The requests of level 1 by the start of their section, and the requests of level 2."""

    sections: "Sections"
    inner: dict[int, list[Request]]
    crossing: list[Request]


@dataclass(frozen=True)
class Sections:
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
    def phases(cls, iteration: Iteration) -> "Sections":
        """A section for each phase. A phase that marks of attention cut in parts is one section together with these
        marks."""
        phases = iteration.trace.phases
        ends = accumulate(len(phase.events) for phase in phases)
        is_cut_out = (ATTENTION in (before.kind, phase.kind) for before, phase in pairwise(phases))
        starts = zip((0, *ends), (False, *is_cut_out), strict=False)
        return cls(tuple(start for start, cut_out in starts if not cut_out))

    def start_of(self, event: int) -> int:
        return self.starts[bisect_right(self.starts, event) - 1]

    def split(self, iteration: Iteration) -> Split:
        inner: dict[int, list[Request]] = defaultdict(list)
        crossing: list[Request] = []
        for request in iteration.served:
            start = self.start_of(request.lower)
            is_inner = start == self.start_of(request.upper) and start not in self.opened
            (inner[start] if is_inner else crossing).append(request)
        return Split(self, inner, crossing)


@dataclass(frozen=True)
class Levels:
    """The addresses of level 1, {start of a section: those of its inner requests by number}, and those of level 2."""

    split: Split
    arenas: Mapping[int, Solution]
    whole: Solution
    parts: tuple[SolvedProblem, ...]

    @property
    def peak_bytes(self) -> int:
        return self.whole.peak_bytes

    def placed(self, bound_bytes: int) -> Placed:
        offsets = {request.id: self.whole.offsets[request.id] for request in self.split.crossing}
        for start, found in self.split.inner.items():
            begin, inner = self.whole.offsets[_arena(start)], self.arenas[start].offsets
            offsets.update((request.id, begin + inner[rank]) for rank, request in enumerate(found))
        return Placed(self.split.sections.planner, offsets, self.peak_bytes, bound_bytes, self.parts)

    def finer(self, bound_bytes: int) -> Sections:
        """The sections that determine the peak are opened if they have few requests, else cut; others stay."""
        sections, inner, crossing = self.split
        deciding = self._deciding(bound_bytes)
        edges = {edge for request in crossing for edge in (request.lower, request.upper)}
        cuts = {edge for edge in edges if sections.start_of(edge) in deciding} - set(sections.starts)
        if cuts and sum(len(inner[start]) for start in deciding) > _FEW:
            return replace(sections, starts=tuple(sorted({*sections.starts, *cuts})), planner="sections")
        planner = "sections" if deciding else sections.planner
        return replace(sections, opened=sections.opened | deciding, planner=planner)

    def _deciding(self, bound_bytes: int) -> frozenset[int]:
        """Starts of the sections during which arenas and requests of level 2 together exceed `bound_bytes`."""
        changes = [(request.lower, request.num_bytes, -1) for request in self.split.crossing]
        changes += [(request.upper, -request.num_bytes, -1) for request in self.split.crossing]
        for start, found in self.split.inner.items():
            arena_bytes = self.arenas[start].peak_bytes
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


def in_two_levels(iteration: Iteration, split: Split) -> Levels:
    arenas, parts = _solve_sections(iteration, split.inner)
    blocks = [block_of(request, request.id) for request in split.crossing]
    for start, found in split.inner.items():
        upper = max(request.upper for request in found)
        blocks.append(Block(_arena(start), found[0].lower, upper, arenas[start].peak_bytes))
    whole = iteration.solve(iteration.problem(blocks))
    top = SolvedProblem("arenas and what crosses phases", len(iteration.trace.phases), len(blocks), whole)
    return Levels(split, arenas, whole, (*parts, top))


def _arena(start: int) -> str:
    return f"arena at {start}"


def _solve_sections(
    iteration: Iteration, inner: Mapping[int, list[Request]]
) -> tuple[dict[int, Solution], tuple[SolvedProblem, ...]]:
    """{start of a section: addresses of its inner requests by number}, and the problems solved; sections with the same
    requests share a solution."""
    alike: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    problems: dict[tuple[bytes, ...], Problem] = {}
    for start, found in inner.items():
        problem = iteration.problem(block_of(request, rank) for rank, request in enumerate(found))
        key = Instance.of(problem).fingerprint()
        problems.setdefault(key, problem)
        alike[key].append(start)
    arenas, parts = {}, []
    for key, starts in alike.items():
        if key not in iteration.arenas:
            iteration.arenas[key] = iteration.solve(problems[key], _SECTION_SHARE)
        solution = iteration.arenas[key]
        arenas.update(dict.fromkeys(starts, solution))
        kind = iteration.trace.phases[inner[starts[0]][0].phase].kind
        parts.append(SolvedProblem(kind, len(starts), len(problems[key].blocks), solution))
    return arenas, tuple(parts)

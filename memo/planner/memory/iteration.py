"""What planning an iteration starts from and ends with: requests, and the address of each."""

import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedPhase, PlannedRequest, Proof
from memo.artifacts.memory_trace import Request, Trace, requests
from memo.planner.memory.dsa import Block, BlockId, Problem, Solution, lower_bound_bytes
from memo.planner.memory.solve import solve


@dataclass(frozen=True)
class SolvedProblem:
    """One problem that was solved for a plan: its name, its number of phases and of blocks, and its solution."""

    name: str
    num_phases: int
    num_blocks: int
    solution: Solution


@dataclass(frozen=True)
class Placed:
    """The address of each served request by id, the peak, a proven bound of it, and the problems solved for them."""

    planner: str
    offsets: Mapping[int, int]
    peak_bytes: int
    bound_bytes: int
    parts: tuple[SolvedProblem, ...]

    @property
    def proof(self) -> Proof:
        """Optimal if the peak meets its bound, else timed out if one of the problems was."""
        if self.peak_bytes == self.bound_bytes:
            return "optimal"
        return "timed out" if any(part.solution.proof == "timed out" for part in self.parts) else "feasible"


@dataclass(frozen=True)
class Iteration:
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
    def of(cls, trace: Trace, min_bytes: int, alignment_bytes: int, time_limit_s: float) -> "Iteration":
        planned = tuple(request for request in requests(trace) if request.num_bytes >= min_bytes)
        return cls(trace, planned, min_bytes, alignment_bytes, time.monotonic() + time_limit_s)

    @cached_property
    def served(self) -> list[Request]:
        """The requests that get an address."""
        return [request for request in self.requests if request.freed_in is not None]

    @cached_property
    def bound_bytes(self) -> int:
        """The most bytes that live at once."""
        return lower_bound_bytes(self.flat_problem())

    def problem(self, blocks: Iterable[Block]) -> Problem:
        return Problem(tuple(blocks), alignment_bytes=self.alignment_bytes)

    def flat_problem(self) -> Problem:
        return self.problem(block_of(request, request.id) for request in self.served)

    def solve(self, problem: Problem, share: float = 1.0) -> Solution:
        """Solve a problem in `share` of the time that is left."""
        return solve(problem, share * max(0.0, self.end_s - time.monotonic()))

    def plan(self, placed: Placed, repeats: Mapping[int, int]) -> MemoryPlan:
        """The plan; `placed` lacks the requests of phases that repeat others."""
        offsets = {**placed.offsets, **dict(self._repeated(placed.offsets, repeats))}
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
            planner=placed.planner,
            alignment_bytes=self.alignment_bytes,
            min_bytes=self.min_bytes,
            arena_bytes=placed.peak_bytes,
            lower_bound_bytes=placed.bound_bytes,
            proof=placed.proof,
            phases=tuple(
                PlannedPhase(phase.kind, phase.layer, phase.microbatch, tuple(planned))
                for phase, planned in zip(self.trace.phases, by_phase, strict=True)
            ),
        )

    def _repeated(self, offsets: Mapping[int, int], repeats: Mapping[int, int]) -> Iterator[tuple[int, int]]:
        """For each served request of a phase that repeats another one, its id and its address."""
        served: dict[int, list[int]] = defaultdict(list)
        for request in self.served if repeats else ():
            served[request.phase].append(request.id)
        for phase, repeated in repeats.items():
            yield from zip(served[phase], (offsets[of] for of in served[repeated]), strict=True)


def block_of(request: Request, name: BlockId) -> Block:
    return Block(name, request.lower, request.upper, request.num_bytes)

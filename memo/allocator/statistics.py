"""Counts of the requests that were served as planned, and of those that were not."""

from dataclasses import dataclass

from memo.allocator.library import COUNTS, REASONS, RawStatistics
from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import Phase


@dataclass(frozen=True)
class Mismatch:
    """One request that was not served as planned.

    Attributes:
        reason: "size": its size differs from the plan's next request; "thread": a different thread made it; "stream":
            a different stream was current; "overlap": a block that is still alive occupies its planned address;
            "exhausted": the plan has no request left in this phase; "block": in a phase of attention, it exceeds the
            rest of the phase's block.
        position: position of the plan's next request in the phase.
        expected_bytes: size of the plan's next request, or of the block in a phase of attention; 0: none was expected.
    """

    reason: str
    phase: Phase
    position: int
    expected_bytes: int
    found_bytes: int

    def __str__(self) -> str:
        planned = f"{self.expected_bytes:,} bytes" if self.expected_bytes else "nothing"
        return f"{self.phase}, request {self.position}: {self.reason}: {self.found_bytes:,} bytes, planned {planned}"


@dataclass(frozen=True)
class Statistics:
    """Counts since the plan was loaded or reset. Requests below the plan's min_bytes are not counted.

    Attributes:
        requests: in planned phases; hits + native + all fallbacks.
        hits: served at their planned address, or in the block of attention.
        native: served by the native allocator, as planned.
        unasked: planned requests that were not made before their phase ended.
        outside: made outside every planned phase, as by the loading of data.
        arena_bytes: bytes of the arena.
        live_blocks, live_bytes: planned blocks in use now.
        peak_bytes: the largest live_bytes.
        fallbacks: unplanned requests by reason, served natively. Some of other threads, such as gloo's, are normal.
        mismatches: the first few of each reason.
    """

    requests: int
    hits: int
    native: int
    unasked: int
    outside: int
    arena_bytes: int
    live_blocks: int
    live_bytes: int
    peak_bytes: int
    fallbacks: dict[str, int]
    mismatches: tuple[Mismatch, ...]

    @property
    def num_fallbacks(self) -> int:
        return sum(self.fallbacks.values())


def from_raw(raw: RawStatistics, plan: MemoryPlan | None) -> Statistics:
    """`plan` names the phases; without one there are no mismatches."""
    mismatches = []
    for reason, count, first in zip(REASONS, raw.fallbacks, raw.first, strict=True):
        for found in list(first)[: count if plan is not None else 0]:
            assert plan is not None
            planned = plan.phases[found.phase]
            phase = Phase(planned.kind, planned.layer, planned.microbatch, ())
            mismatches.append(Mismatch(reason, phase, found.position, found.expected_bytes, found.found_bytes))
    counts = {name: int(getattr(raw, name)) for name in COUNTS}
    fallbacks = dict(zip(REASONS, map(int, raw.fallbacks), strict=True))
    return Statistics(**counts, fallbacks=fallbacks, mismatches=tuple(mismatches))

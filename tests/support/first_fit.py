"""A memory plan by the simplest rule: large requests first, each at the lowest address that is free all its life."""

from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedPhase, PlannedRequest
from memo.artifacts.memory_trace import Request, Trace, requests

ALIGNMENT_BYTES = 64


def first_fit(trace: Trace, min_bytes: int = 256) -> MemoryPlan:
    """Return the plan; requests that outlive the iteration are left to the native allocator."""
    wanted = [request for request in requests(trace) if request.num_bytes >= min_bytes]
    offsets: dict[int, int] = {}
    placed: list[Request] = []
    for request in sorted(wanted, key=lambda r: -r.num_bytes):
        if request.freed_in is None:
            offsets[request.id] = NATIVE
            continue
        beside = [r for r in placed if r.lower < request.upper and request.lower < r.upper]
        offset = 0
        for other in sorted(beside, key=lambda r: offsets[r.id]):
            if offsets[other.id] >= offset + request.num_bytes:
                break
            offset = max(offset, _round_up(offsets[other.id] + other.num_bytes))
        offsets[request.id] = offset
        placed.append(request)
    phases = tuple(
        PlannedPhase(
            *(phase.kind, phase.layer, phase.microbatch),
            tuple(PlannedRequest(r.num_bytes, offsets[r.id]) for r in wanted if r.phase == index),
        )
        for index, phase in enumerate(trace.phases)
    )
    return MemoryPlan(
        device=trace.device,
        planner="flat",
        alignment_bytes=ALIGNMENT_BYTES,
        min_bytes=min_bytes,
        arena_bytes=max((_round_up(offsets[r.id] + r.num_bytes) for r in placed), default=0),
        lower_bound_bytes=max((_live_bytes(placed, at.lower) for at in placed), default=0),
        proof="feasible",
        phases=phases,
    )


def _live_bytes(placed: list[Request], event: int) -> int:
    return sum(r.num_bytes for r in placed if r.lower <= event < r.upper)


def _round_up(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

"""Replays an iteration against its memory plan and names what is wrong; shares no code with the planner."""

from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedPhase, PlannedRequest
from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace, check_trace
from memo.errors import PlanError
from memo.planner.memory.validator import LiveBlocks


def check_memory_plan(plan: MemoryPlan, trace: Trace) -> None:
    """Serve every request of `trace` from `plan`, as the planned allocator will.

    Raises PlanError, naming phase and request, if phases, requests or sizes differ from those of the trace, if an
    address is unaligned or outside the arena, if two live blocks overlap, if a request is native although it is freed
    in the iteration or planned although it is not, or if the bound or the proof contradicts the arena. Raises
    TraceError as `check_trace`.
    """
    check_trace(trace)
    _check_numbers(plan)
    if len(plan.phases) != len(trace.phases):
        raise PlanError(f"the plan has {len(plan.phases)} phases, the trace {len(trace.phases)}: solve this trace")
    freed = {event.id for phase in trace.phases for event in phase.events if isinstance(event, Free)}
    replay = _Replay(plan, freed)
    for planned, phase in zip(plan.phases, trace.phases, strict=True):
        replay.serve(planned, phase)


def _check_numbers(plan: MemoryPlan) -> None:
    if plan.lower_bound_bytes > plan.arena_bytes:
        raise PlanError(f"lower_bound_bytes is {plan.lower_bound_bytes}, above arena_bytes of {plan.arena_bytes}")
    if (plan.proof == "optimal") != (plan.lower_bound_bytes == plan.arena_bytes):
        raise PlanError(
            f"proof is {plan.proof!r}, but lower_bound_bytes is {plan.lower_bound_bytes} and arena_bytes "
            f"{plan.arena_bytes}"
        )


class _Replay:
    def __init__(self, plan: MemoryPlan, freed: set[int]) -> None:
        self.plan = plan
        self.freed = freed
        self.live = LiveBlocks()
        self.offsets: dict[int, int] = {}

    def serve(self, planned: PlannedPhase, phase: Phase) -> None:
        if (planned.kind, planned.layer, planned.microbatch) != (phase.kind, phase.layer, phase.microbatch):
            found = f"{planned.kind} (layer {planned.layer}, microbatch {planned.microbatch})"
            raise PlanError(f"the plan has the phase {found} where the trace has {phase}: solve this trace")
        mallocs = [e for e in phase.events if isinstance(e, Malloc) and e.num_bytes >= self.plan.min_bytes]
        if len(mallocs) != len(planned.requests):
            raise PlanError(f"{phase}: the plan has {len(planned.requests)} requests, the trace {len(mallocs)}")
        cursor = iter(planned.requests)
        for event in phase.events:
            if isinstance(event, Free):
                if event.id in self.offsets:
                    self.live.remove(self.offsets.pop(event.id))
            elif event.num_bytes >= self.plan.min_bytes:
                self._serve(f"{phase}, request {event.id}", event, next(cursor))

    def _serve(self, name: str, malloc: Malloc, request: PlannedRequest) -> None:
        if request.num_bytes != malloc.num_bytes:
            raise PlanError(f"{name}: the plan has {request.num_bytes} bytes, the trace {malloc.num_bytes}")
        if (request.offset_bytes == NATIVE) != (malloc.id not in self.freed):
            does = "is native, but is freed within" if malloc.id in self.freed else "is planned, but outlives"
            raise PlanError(f"{name} {does} the iteration")
        if request.offset_bytes == NATIVE:
            return
        begin, alignment = request.offset_bytes, self.plan.alignment_bytes
        if begin < 0 or begin % alignment:
            raise PlanError(f"{name} lies at {begin}, not a multiple of {alignment} from 0 on")
        if begin + malloc.num_bytes > self.plan.arena_bytes:
            raise PlanError(f"{name} ends at {begin + malloc.num_bytes}, beyond the arena of {self.plan.arena_bytes}")
        self.live.add(name, begin, malloc.num_bytes)
        self.offsets[malloc.id] = begin

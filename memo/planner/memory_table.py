"""A memory plan for people: what is reserved, beside the bound and what PyTorch's own allocator would reserve."""

from memo.artifacts.memory_plan import NATIVE, MemoryPlan
from memo.artifacts.trace import Trace
from memo.planner.caching import Mode, simulate_caching
from memo.units import format_bytes


def describe_plan(plan: MemoryPlan, trace: Trace) -> str:
    """Four lines of reserved memory for one iteration of one rank; the last says how good the plan is.

    PyTorch's two modes are simulated on the same requests (memo.planner.caching): they serve every request, the
    plan those of at least min_bytes.
    """
    planned = [request for phase in plan.phases for request in phase.requests]
    num_native = sum(request.offset_bytes == NATIVE for request in planned)
    rows = [(f"PyTorch, {name}", _reserved(trace, mode)) for name, mode in _MODES.items()]
    rows.append((f"planned ({plan.planner})", plan.arena_bytes))
    width = max(len(name) for name, _ in rows)
    lines = [
        f"{name:<{width}}  {format_bytes(num_bytes):>12}  {_over(num_bytes, plan.lower_bound_bytes)}"
        for name, num_bytes in rows
    ]
    counted = f"{len(planned) - num_native} requests of at least {format_bytes(plan.min_bytes)} have addresses"
    outlive = f", {num_native} outlive the iteration" if num_native else ""
    bound = f"at most {format_bytes(plan.lower_bound_bytes)} of them are alive at once"
    return "\n".join([*lines, f"{counted}{outlive}; {bound}: {_verdict(plan)}"])


_MODES: dict[str, Mode] = {"default": "default", "expandable_segments": "expandable"}


def _reserved(trace: Trace, mode: Mode) -> int:
    return simulate_caching(trace, mode).reserved_bytes


def _over(num_bytes: int, bound_bytes: int) -> str:
    return f"{100 * (num_bytes / bound_bytes - 1):+.1f} %" if bound_bytes else ""


def _verdict(plan: MemoryPlan) -> str:
    if plan.proof == "optimal":
        return "no plan takes less"
    gap = format_bytes(plan.arena_bytes - plan.lower_bound_bytes)
    return (
        f"{'the solver was stopped; ' if plan.proof == 'timed out' else ''}another plan could take {gap} less at best"
    )

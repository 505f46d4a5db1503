"""A memory plan for people: what is reserved, beside the bound and what PyTorch's own allocator would reserve."""

from memo.artifacts.memory_plan import NATIVE, MemoryPlan
from memo.artifacts.memory_trace import Trace
from memo.planner.caching import Mode, simulate_caching
from memo.text_table import text_table
from memo.units import format_bytes


def describe_plan(plan: MemoryPlan, trace: Trace) -> str:
    """Four lines of reserved memory for one iteration of one rank; the last says how good the plan is.

    PyTorch's two modes are simulated on the same requests (memo.planner.caching): they serve every request, the
    plan those of at least min_bytes.
    """
    planned = [request for phase in plan.phases for request in phase.requests]
    num_native = sum(request.offset_bytes == NATIVE for request in planned)
    sizes = {f"PyTorch, {name}": _reserved(trace, mode) for name, mode in _MODES.items()}
    sizes[f"planned ({plan.planner})"] = plan.arena_bytes
    bound_bytes = plan.lower_bound_bytes
    rows = [(name, format_bytes(size), _over(size, bound_bytes)) for name, size in sizes.items()]
    counted = f"{len(planned) - num_native} requests of at least {format_bytes(plan.min_bytes)} have addresses"
    outlive = f", {num_native} outlive the iteration" if num_native else ""
    bound = f"at most {format_bytes(plan.lower_bound_bytes)} of them are alive at once"
    return "\n".join([text_table(rows, left=(0, 2)), f"{counted}{outlive}; {bound}: {_verdict(plan)}"])


def plan_headline(plan: MemoryPlan, trace: Trace) -> str:
    """The reserved memory and the verdict in one line."""
    others = ", ".join(f"{format_bytes(_reserved(trace, mode))} {name}" for name, mode in _MODES.items())
    return f"{format_bytes(plan.arena_bytes)} at planned addresses ({_verdict(plan)}); PyTorch would reserve {others}"


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

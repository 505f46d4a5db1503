"""Microbatches that repeat each other are planned once."""

from dataclasses import replace

import pytest

from memo.artifacts.memory_trace import Event, Free, Malloc, Phase, Trace
from memo.planner.memory.repeats import repeated_phases
from memo.planner.memory.trace_plan import solve_trace

SHARED = 1_000_000


def iteration(microbatches: int, leaves: bool = False) -> Trace:
    """Gradients live from the first backward to the end; if it `leaves` something, the next microbatch frees it."""
    phases = []
    for m in range(microbatches):
        at = 100 * m
        forward: list[Event] = [Malloc(at, 3000), Malloc(at + 1, 10), Malloc(at + 2, 500)]
        backward: list[Event] = [Malloc(at + 3, 2000), *([] if m else [Malloc(SHARED, 700)]), Free(at + 3), Free(at)]
        later = [Free(at - 98)] if leaves and m else []
        if not leaves or m == microbatches - 1:
            later.append(Free(at + 2))
        small: list[Event] = [Free(at - 99)] if m else []  # is not planned
        phases.append(Phase("layer_forward", 0, m, (*small, *forward)))
        phases.append(Phase("layer_backward", 0, m, (*backward, *later)))
    return Trace("cpu", "recorded", (*phases, Phase("reduction", -1, -1, (Free(SHARED),))))


def planned(trace: Trace) -> set[int]:
    return {e.id for phase in trace.phases for e in phase.events if isinstance(e, Malloc) and e.num_bytes >= 100}


def test_all_between_the_first_and_the_last_repeat_the_second() -> None:
    trace = iteration(5)
    assert repeated_phases(trace, planned(trace)) == {4: 2, 5: 3, 6: 2, 7: 3}
    assert repeated_phases(iteration(3), planned(trace)) == {} == repeated_phases(iteration(1), planned(trace))


def test_one_that_asks_for_something_else_is_planned_for_itself() -> None:
    trace = iteration(5)
    other = replace(trace.phases[4], events=(*trace.phases[4].events, Malloc(7, 900), Free(7)))
    changed = replace(trace, phases=(*trace.phases[:4], other, *trace.phases[5:]))
    assert repeated_phases(changed, planned(changed)) == {6: 2, 7: 3}


def test_what_lives_on_in_the_next_microbatch_forbids_it() -> None:
    trace = iteration(5, leaves=True)
    assert repeated_phases(trace, planned(trace)) == {}


@pytest.mark.parametrize("planner", ["auto", "paper", "flat"])
def test_the_plan_of_few_is_that_of_all(planner: str) -> None:
    """It is checked against the whole trace, and repeats the addresses of the second microbatch."""
    plan = solve_trace(iteration(40), planner, min_bytes=100, alignment_bytes=1).plan  # type: ignore[arg-type]
    assert (plan.arena_bytes, plan.proof) == (3000 + 500 + 2000 + 700, "optimal")
    assert [phase.microbatch for phase in plan.phases] == [*sorted(2 * list(range(40))), -1]
    offsets = [[request.offset_bytes for request in phase.requests] for phase in plan.phases]
    assert offsets[2:78] == 38 * offsets[2:4]

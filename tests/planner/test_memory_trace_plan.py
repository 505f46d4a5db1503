"""Plans of whole iterations: valid, truthful, structured as the paper says; the check names every fault."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedRequest
from memo.artifacts.memory_trace import Event, Free, Malloc, Phase, Trace
from memo.errors import PlanError, TraceError
from memo.planner.memory import levels, trace_plan
from memo.planner.memory.plan_check import check_memory_plan
from memo.planner.memory.trace_plan import Planner, solve_trace

PLANNERS: tuple[Planner, ...] = ("paper", "flat", "auto")


class Recorder:
    """Writes a trace down phase by phase."""

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.events: list[Event] = []
        self.num_made = 0

    def make(self, num_bytes: int) -> int:
        self.num_made += 1
        self.events.append(Malloc(self.num_made, num_bytes))
        return self.num_made

    def free(self, *ids: int) -> None:
        self.events += [Free(block) for block in ids]

    def end(self, kind: str, layer: int = -1, microbatch: int = -1) -> None:
        self.phases.append(Phase(kind, layer, microbatch, tuple(self.events)))
        self.events = []

    def trace(self) -> Trace:
        return Trace("cpu", "recorded", tuple(self.phases))


def layers(num_layers: int) -> Trace:
    """Forwards that keep one block each, a loss, backwards; and a block that outlives the iteration."""
    recorder = Recorder()
    kept = []
    for layer in range(num_layers):
        wide = recorder.make(4000)
        kept.append(recorder.make(1000))
        noise = recorder.make(7)  # below min_bytes, of another number in each layer
        recorder.free(wide)
        narrow = recorder.make(2000)
        recorder.free(noise, narrow, *(recorder.make(3) for _ in range(layer)))
        recorder.end("layer_forward", layer, 0)
    recorder.make(500)
    recorder.end("loss", microbatch=0)
    for layer in reversed(range(num_layers)):
        gradient, wide = recorder.make(1000), recorder.make(4000)
        recorder.free(kept.pop(), wide, gradient)
        recorder.end("layer_backward", layer, 0)
    return recorder.trace()


def at_random(chance: random.Random) -> Trace:
    recorder = Recorder()
    live: list[int] = []
    for phase in range(chance.randint(1, 8)):
        for _ in range(chance.randint(0, 12)):
            if live and chance.random() < 0.5:
                recorder.free(live.pop(chance.randrange(len(live))))
            else:
                live.append(recorder.make(chance.randint(1, 5000)))
        if phase == 0:
            live.append(recorder.make(100))
        recorder.end(chance.choice(("layer_forward", "layer_backward")), phase, 0)
    return recorder.trace()


def test_two_levels_by_hand() -> None:
    trace = layers(3)
    planning = solve_trace(trace, "paper", min_bytes=500, alignment_bytes=500)
    # Forward: 4000 and 2000 in turn. Backward: 1000 beside 4000. One layer keeps 1000 when it is at its widest.
    assert [(part.name, part.num_phases, part.num_blocks, part.solution.peak_bytes) for part in planning.parts] == [
        ("layer_forward", 3, 2, 4000),
        ("layer_backward", 3, 2, 5000),
        ("arenas and what crosses phases", 7, 9, 8000),
    ]
    plan = planning.plan
    assert (plan.planner, plan.arena_bytes, plan.lower_bound_bytes, plan.proof) == ("paper", 8000, 8000, "optimal")
    assert (plan.device, plan.min_bytes, plan.alignment_bytes) == ("cpu", 500, 500)
    assert [phase.kind for phase in plan.phases] == [phase.kind for phase in trace.phases]
    assert [[request.num_bytes for request in phase.requests] for phase in plan.phases] == (
        [[4000, 1000, 2000]] * 3 + [[500]] + [[1000, 4000]] * 3
    )
    assert plan.phases[3].requests == (PlannedRequest(500, NATIVE),)


def test_the_optimizer_is_one_block_of_the_second_level() -> None:
    """Two weight shards that are gathered one after the other, beside a reduced gradient from before."""
    recorder = Recorder()
    kept, reduced = recorder.make(1000), recorder.make(500)
    recorder.free(kept)
    recorder.end("layer_backward", 0, 0)
    for shard in (2000, 3000):
        recorder.free(recorder.make(shard))
    recorder.free(reduced)
    recorder.end("optimizer")
    planning = solve_trace(recorder.trace(), "paper", min_bytes=500, alignment_bytes=500)
    assert [(part.name, part.num_phases, part.num_blocks, part.solution.peak_bytes) for part in planning.parts] == [
        ("layer_backward", 1, 1, 1000),
        ("optimizer", 1, 2, 3000),  # the shards lie on one another
        ("arenas and what crosses phases", 2, 3, 3500),  # two arenas and the reduced gradient
    ]
    first, second = planning.plan.phases[-1].requests
    assert first.offset_bytes == second.offset_bytes and planning.plan.arena_bytes == 3500


def test_phases_that_ask_for_the_same_have_the_same_addresses_within_their_arena() -> None:
    plan = solve_trace(layers(4), "paper", min_bytes=10, alignment_bytes=1).plan
    backwards = [phase.requests for phase in plan.phases if phase.kind == "layer_backward"]
    assert len({wide.offset_bytes - gradient.offset_bytes for gradient, wide in backwards}) == 1


def test_phases_that_free_at_other_times_do_not_share_addresses() -> None:
    """Same sizes in the same order; in the second phase `first` still lives when `last` is made."""
    recorder = Recorder()
    for phase in range(2):
        early, first = recorder.make(500), recorder.make(1000)
        recorder.free(early)
        if phase == 0:
            recorder.free(first)
        last = recorder.make(1000)
        if phase == 1:
            recorder.free(first)
        recorder.free(last)
        recorder.end("layer_forward", phase, 0)
    planning = solve_trace(recorder.trace(), "paper", min_bytes=1, alignment_bytes=1)
    assert [(part.num_phases, part.solution.peak_bytes) for part in planning.parts] == [(1, 1500), (1, 2000), (2, 2000)]


def two_levels_lose() -> Trace:
    """`kept` is made when `wide` is gone: at once it lies in its place, but the arena holds that to the phase's end."""
    recorder = Recorder()
    wide = recorder.make(4000)
    recorder.free(wide)
    kept, last = recorder.make(3000), recorder.make(1000)
    recorder.free(last)
    recorder.end("layer_forward", 0, 0)
    recorder.free(kept)
    recorder.end("layer_backward", 0, 0)
    return recorder.trace()


def test_auto_takes_what_is_better_and_says_which() -> None:
    options = {"min_bytes": 1, "alignment_bytes": 1}
    assert solve_trace(layers(3), "auto", **options).plan.planner == "paper"
    plan = solve_trace(two_levels_lose(), "auto", **options).plan
    assert (plan.planner, plan.arena_bytes, plan.proof) == ("flat", 4000, "optimal")
    paper = solve_trace(two_levels_lose(), "paper", **options).plan
    assert (paper.planner, paper.arena_bytes, paper.lower_bound_bytes, paper.proof) == ("paper", 7000, 4000, "feasible")


@pytest.mark.parametrize("planner", PLANNERS)
def test_random_iterations_are_valid(planner: Planner, monkeypatch: pytest.MonkeyPatch) -> None:
    """solve_trace replays its own plan; here also that the bound is the most that lives at once."""
    monkeypatch.setattr("memo.planner.memory.solve._MAX_MIP_PAIRS", -1)  # which takes longer than all else
    chance = random.Random(10)
    for _ in range(60):
        trace = at_random(chance)
        plan = solve_trace(trace, planner, min_bytes=200, alignment_bytes=64, time_limit_s=0.2).plan
        check_memory_plan(plan, trace)
        assert plan.lower_bound_bytes == most_live_bytes(trace, 200, 64)


def most_live_bytes(trace: Trace, min_bytes: int, alignment_bytes: int) -> int:
    events = [event for phase in trace.phases for event in phase.events]
    freed = {event.id for event in events if isinstance(event, Free)}
    sizes = {
        event.id: -(-event.num_bytes // alignment_bytes) * alignment_bytes
        for event in events
        if isinstance(event, Malloc) and event.num_bytes >= min_bytes and event.id in freed
    }
    live = most = 0
    for event in events:
        live += sizes.get(event.id, 0) * (1 if isinstance(event, Malloc) else -1)
        most = max(most, live)
    return most


def test_nothing_to_plan_gives_an_empty_arena() -> None:
    plan = solve_trace(layers(2), min_bytes=10_000).plan
    assert (plan.arena_bytes, plan.lower_bound_bytes, plan.proof) == (0, 0, "optimal")
    assert not any(phase.requests for phase in plan.phases)


def test_malformed_traces_are_refused() -> None:
    broken = Trace("cpu", "recorded", (Phase("loss", -1, -1, (Malloc(1, 8), Free(1), Free(1))),))
    with pytest.raises(TraceError, match="request 1 is freed twice"):
        solve_trace(broken)


def with_request(phase: int, at: int, request: PlannedRequest) -> Callable[[MemoryPlan], MemoryPlan]:
    def change(plan: MemoryPlan) -> MemoryPlan:
        phases = list(plan.phases)
        requests = list(phases[phase].requests)
        requests[at] = request
        phases[phase] = replace(phases[phase], requests=tuple(requests))
        return replace(plan, phases=tuple(phases))

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: replace(plan, phases=plan.phases[1:]), "the plan has 4 phases, the trace 5"),
        (lambda plan: replace(plan, phases=plan.phases[::-1]), r"layer_backward \(layer 0.* trace has layer_forward"),
        (
            lambda plan: replace(plan, phases=(replace(plan.phases[0], requests=()), *plan.phases[1:])),
            "layer_forward layer 0 microbatch 0: the plan has 0 requests, the trace 3",
        ),
        (with_request(0, 1, PlannedRequest(999, 0)), "request 2: the plan has 999 bytes, the trace 1000"),
        (with_request(0, 0, PlannedRequest(4000, NATIVE)), "request 1 is native, but is freed within the iteration"),
        (with_request(2, 0, PlannedRequest(500, 0)), "loss microbatch 0, request 10 is planned, but outlives"),
        (with_request(0, 0, PlannedRequest(4000, 300)), "request 1 lies at 300, not a multiple of 500"),
        (with_request(0, 0, PlannedRequest(4000, -500)), "request 1 lies at -500"),
        (with_request(0, 0, PlannedRequest(4000, 90_000)), "request 1 ends at 94000, beyond the arena"),
        (lambda plan: replace(plan, lower_bound_bytes=plan.arena_bytes + 1), "lower_bound_bytes is"),
        (lambda plan: replace(plan, proof="feasible"), "proof is 'feasible'"),
        (lambda plan: replace(plan, proof="optimal", lower_bound_bytes=1), "proof is 'optimal'"),
    ],
)
def test_the_check_names_the_fault(change: Callable[[MemoryPlan], MemoryPlan], message: str) -> None:
    trace = layers(2)
    plan = solve_trace(trace, min_bytes=10, alignment_bytes=500).plan
    check_memory_plan(plan, trace)
    with pytest.raises(PlanError, match=message):
        check_memory_plan(change(plan), trace)


def test_the_check_finds_overlaps_between_phases_and_in_part() -> None:
    trace = layers(2)
    plan = solve_trace(trace, min_bytes=10, alignment_bytes=500).plan
    wide, kept = (request.offset_bytes for request in plan.phases[0].requests[:2])
    message = "layer_forward layer 1 microbatch 0, request .* while layer_forward layer 0 microbatch 0, request 2 lives"
    with pytest.raises(PlanError, match=message):
        check_memory_plan(with_request(1, 1, PlannedRequest(1000, kept))(plan), trace)
    with pytest.raises(PlanError, match=f"request 2 lies at {wide + 500} to {wide + 1500} while .*request 1 lives"):
        check_memory_plan(with_request(0, 1, PlannedRequest(1000, wide + 500))(plan), trace)


def test_long_phases_are_cut_where_a_crossing_request_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient that a backward receives is gone when its scratch is largest: one arena would lie beside it."""
    events: list[Malloc | Free] = []
    phases = []
    for layer in range(3):
        events = [Malloc(10 * layer + 1, 1000), Free(10 * layer + 1)]
        if layer:
            events.append(Free(10 * (layer - 1) + 5))  # what the phase before handed over
        events += [Malloc(10 * layer + 2, 4000), Free(10 * layer + 2), Malloc(10 * layer + 5, 3000)]
        phases.append(Phase("layer_backward", layer, 0, tuple(events)))
    trace = Trace("cpu", "recorded", (*phases, Phase("reduction", -1, -1, (Free(25),))))
    monkeypatch.setattr(levels, "_FEW", 0)
    monkeypatch.setattr(trace_plan, "_MAX_AT_ONCE", 0)
    whole, cut = (solve_trace(trace, planner, min_bytes=1, alignment_bytes=1).plan for planner in ("paper", "auto"))
    assert (whole.arena_bytes, whole.lower_bound_bytes) == (7000, 4000)
    assert (cut.planner, cut.arena_bytes, cut.proof) == ("sections", 4000, "optimal")


def test_many_requests_are_not_planned_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """One order of them all would take longer than the levels, which have all the time for finer sections instead."""
    monkeypatch.setattr(trace_plan, "_MAX_CROSSING", -1)  # here no finer sections, which would reach the bound
    plan = solve_trace(two_levels_lose(), "auto", min_bytes=1, alignment_bytes=1).plan
    assert (plan.planner, plan.arena_bytes) == ("flat", 4000)
    monkeypatch.setattr(trace_plan, "_MAX_AT_ONCE", 2)  # of 3 requests
    plan = solve_trace(two_levels_lose(), "auto", min_bytes=1, alignment_bytes=1).plan
    assert (plan.planner, plan.arena_bytes) == ("paper", 7000)

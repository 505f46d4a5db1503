"""The phases of a layer's states: calls in a wrong order, and plans with a mistake, are refused with a message."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import get_args
from unittest.mock import patch

import pytest
import state_runs
from state_runs import Seen, StateRun
from swap_runs import stage_ops

from memo.errors import PlanError
from memo.executor.cpu_streams import VirtualStreams
from memo.executor.states import StateStreamer
from memo.mesh import Mesh, RankGrid
from memo.planner.state_plan import Start, StatePlan, StateStep, placed_state_plan
from memo.spec.placement import StatePlacement

LAYERS = 4
OPS = stage_ops(1, 1, 2, LAYERS, 0)
PLACEMENTS = {
    "all": StatePlacement(LAYERS, LAYERS, LAYERS, LAYERS),
    "half of the gradients and weights": StatePlacement(LAYERS, LAYERS, 2, 2),
    "one layer": StatePlacement(LAYERS, 1, 1, 1),
}
ALONE = Mesh(RankGrid(), 0)

pytestmark = pytest.mark.usefixtures("one_thread")


def streamer(until: int = 0) -> StateStreamer:
    """In a step of which so many operations have run."""
    states = StateRun(OPS, PLACEMENTS["all"], VirtualStreams(), ALONE).states
    assert states is not None
    states.next_step()
    for op in OPS[:until]:
        states.begin(op.kind, op.layer)
        states.end(op.kind, op.layer)
    return states


FIRST_BACKWARD = next(index for index, op in enumerate(OPS) if op.kind == "B")
LAST_LAYER = LAYERS - 1


def end_alone(states: StateStreamer) -> None:
    states.end("F", 0)


def begin_twice(states: StateStreamer) -> None:
    states.begin("F", 0)
    states.begin("F", 0)


def update_within(states: StateStreamer) -> None:
    states.begin("F", 0)
    states.await_gradients()


def end_of_evaluation_alone(states: StateStreamer) -> None:
    states.end_unplanned(2)


def backward_end_alone(states: StateStreamer) -> None:
    states.end("B", LAST_LAYER)


def update_before_the_last_reduction(states: StateStreamer) -> None:
    states.await_gradients()


def finish_twice(states: StateStreamer) -> None:
    layer = states._layers[0]
    layer.finish_reduction(None)
    layer.finish_reduction(None)


def forget_within(states: StateStreamer) -> None:
    states.begin("F", 0)
    states.forget()
    states.end("F", 0)


@pytest.mark.parametrize(
    ("calls", "until", "message"),
    [
        (end_alone, 0, "F0 layer 0: the weights of layer 0 cannot go from 'away' to 'kept'"),
        (begin_twice, 0, "fetch of the weights of layer 0: the weights of layer 0 cannot go from 'in use' to 'away'"),
        (update_within, 0, r"await_gradients, but in the state plan F0 layer 0 comes next \(step 0 of 16\)"),
        (end_of_evaluation_alone, 0, "forward of layer 2: the weights of layer 2 cannot go from 'away' to 'kept'"),
        (backward_end_alone, FIRST_BACKWARD, "B0 layer 3: the weights of layer 3 cannot go from 'kept' to 'kept'"),
        (update_before_the_last_reduction, len(OPS), "await_gradients: the gradient of layer 0 is still 'leaving'"),
        (finish_twice, len(OPS), "finish_reduction: the gradient of layer 0 is not being reduced"),
        (forget_within, 0, "F0 layer 0: the weights of layer 0 cannot go from 'away' to 'kept'"),
    ],
)
def test_a_wrong_order_of_calls_is_refused(calls: Callable[[StateStreamer], None], until: int, message: str) -> None:
    states = streamer(until)
    with pytest.raises(PlanError, match=message):
        calls(states)


def test_a_step_after_a_refused_call_begins_anew() -> None:
    (work, right) = (StateRun(OPS, PLACEMENTS["all"], VirtualStreams("lazy"), ALONE) for _ in range(2))
    assert work.states is not None
    work.states.next_step()
    with pytest.raises(PlanError):
        begin_twice(work.states)
    work.step()
    right.step()
    assert not work.finish().differs_from(right.finish())


def test_an_evaluation_after_one_that_failed_within_a_layer() -> None:
    (work, right) = (StateRun(OPS, PLACEMENTS["all"], VirtualStreams("lazy"), ALONE) for _ in range(2))
    assert work.states is not None
    work.states.begin_unplanned(0)
    work.states.end_unplanned(0)
    work.states.begin_unplanned(1)
    work.evaluate()
    right.evaluate()
    assert not work.finish().differs_from(right.finish())


def mistakes(plan: StatePlan) -> Iterator[tuple[str, StatePlan]]:
    """Plans of which one step fetches less or elsewhere, or treats a gradient in a slot in another way."""

    def planted(index: int, step: StateStep) -> StatePlan:
        return replace(plan, steps=(*plan.steps[:index], step, *plan.steps[index + 1 :]))

    for index, step in enumerate(plan.steps):
        for fetch in step.fetches:
            others = tuple(other for other in step.fetches if other is not fetch)
            yield f"{step.op}: no {fetch}", planted(index, step._replace(fetches=others))
            slots = plan.num_weight_slots if fetch.kind == "weights" else plan.num_gradient_slots
            for slot in set(range(slots)) - {fetch.slot}:
                moved = step._replace(fetches=(*others, fetch._replace(slot=slot)))
                yield f"{step.op}: {fetch} in {slot}", planted(index, moved)
        if step.gradient_slot is None:
            continue
        for start in set(get_args(Start)) - {step.start}:
            yield f"{step.op}: {start} instead of {step.start}", planted(index, step._replace(start=start))
        if not step.is_last:
            for end in {"keep", "offload"} - {step.end}:
                yield f"{step.op}: {end} instead of {step.end}", planted(index, step._replace(end=end))
        else:
            yield f"{step.op}: not reduced", planted(index, step._replace(end="keep"))


def step_with(plan: StatePlan, placement: StatePlacement) -> Seen:
    with patch.object(state_runs, "placed_state_plan", lambda *_: plan):
        work = StateRun(OPS, placement, VirtualStreams("lazy"), ALONE)
    work.step()
    return work.finish()


@pytest.mark.parametrize("name", PLACEMENTS)
def test_a_mistake_in_the_plan_is_refused_or_changes_no_bit(name: str) -> None:
    placement = PLACEMENTS[name]
    plan = placed_state_plan(OPS, placement)
    right, refused, unseen = step_with(plan, placement), set[str](), list[str]()
    for what, wrong in mistakes(plan):
        try:
            if step_with(wrong, placement).differs_from(right):
                unseen.append(what)
        except PlanError as error:
            assert "layer" in str(error)
            refused.add(what.split(": ")[1].split()[0])
    assert unseen == []
    assert {"no", "zero", "kept", "not"} <= refused, "of each kind some"

"""State plans of every kind of schedule, replayed by other code; fetches are the fewest of which none is late."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from state_plan_replay import Replay, WrongPlan, fewest_fetches
from swap_runs import SCHEDULES, breadth_first_ops, stage_ops

from memo.planner.state_plan import Fetch, StatePlan, StateStep, state_plan
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import NUM_STATE_SLOTS, LayerPlaces, StatePlacement, count_of

RESIDENT = LayerPlaces()
KINDS = (
    RESIDENT,
    LayerPlaces(optimizer_on_host=True),
    LayerPlaces(optimizer_on_host=True, gradients_in_slot=True),
    LayerPlaces(optimizer_on_host=True, weights_in_slot=True),
    LayerPlaces(True, True, True),
)
SHARDED = (LayerPlaces(False, True, False), LayerPlaces(True, True, False), LayerPlaces(False, True, True), KINDS[-1])
"""Under ZeRO-2 and ZeRO-3 every gradient is in a slot."""


def layers_of(ops: list[LayerOp]) -> list[int]:
    return sorted({op.layer for op in ops})


def replayed(
    ops: list[LayerOp], places: dict[int, LayerPlaces], slots: int = NUM_STATE_SLOTS, reduces_each: bool = False
) -> Replay:
    plan = state_plan(ops, places, reduces_each=reduces_each, slots=slots)
    return Replay(plan, ops, places, slots, reduces_each).run()


def uses_of(ops: list[LayerOp], places: dict[int, LayerPlaces]) -> list[int]:
    return [op.layer for op in ops if places[op.layer].weights_in_slot]


def random_ops(chance: random.Random) -> list[LayerOp]:
    """A stage of 1F1B or interleaved 1F1B, small enough for all ways to fill its slots to be tried."""
    stages, chunks = chance.choice([(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (2, 3)])
    layers = stages * chunks * chance.randint(1, 4 if chunks == 1 else 2)
    return stage_ops(stages, chunks, stages * chance.randint(1, 3), layers, chance.randrange(stages))


@pytest.mark.parametrize("seed", range(24))
def test_any_layers_may_stream_under_any_schedule(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        ops, slots, reduces_each = random_ops(chance), chance.choice([1, 2, 2, 2, 3]), chance.random() < 0.3
        places = {layer: chance.choice(SHARDED if reduces_each else KINDS) for layer in layers_of(ops)}
        found = replayed(ops, places, slots, reduces_each)
        uses = uses_of(ops, places)
        assert found.weight_fetches == (fewest_fetches(uses, min(slots, len(set(uses)))) if uses else 0)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shares", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.5), (0.75, 0.75, 0.25), (0.5, 0.0, 0.5)])
def test_placements_of_runs(name: str, shares: tuple[float, float, float]) -> None:
    ops = SCHEDULES[name]
    layers = layers_of(ops)
    placement = StatePlacement(len(layers), *(count_of(share, len(layers)) for share in shares))
    found = replayed(ops, {layer: placement.of_layer(i) for i, layer in enumerate(layers)})
    assert (found.weight_fetches > 0) == (shares[2] > 0)


def test_the_last_layer_is_fetched_once_for_forward_and_backward() -> None:
    ops = stage_ops(1, 1, 1, 6, 0)
    found = replayed(ops, dict.fromkeys(range(6), KINDS[-1]))
    # Six for the forwards; of the backwards the first two find their layers in the slots.
    assert found.weight_fetches == 6 + 4
    assert found.gradient_fetches == 0


def test_as_many_layers_as_slots_stay_where_they_are() -> None:
    ops = stage_ops(2, 1, 4, 4, 0)
    found = replayed(ops, dict.fromkeys(range(2), KINDS[-1]))
    assert (found.weight_fetches, found.gradient_fetches) == (2, 0)


def test_sums_of_three_layers_come_and_go() -> None:
    ops = stage_ops(1, 1, 3, 3, 0)
    found = replayed(ops, dict.fromkeys(range(3), KINDS[-1]))
    assert found.gradient_fetches == 3 * 2  # each but in its first backward


def test_one_layer_keeps_its_sum_through_all_microbatches() -> None:
    ops = stage_ops(1, 1, 4, 3, 0)
    found = replayed(ops, {0: RESIDENT, 1: KINDS[2], 2: RESIDENT})
    assert found.gradient_fetches == 0


def test_nothing_streams() -> None:
    ops = stage_ops(1, 1, 2, 3, 0)
    plan = state_plan(ops, dict.fromkeys(range(3), RESIDENT))
    assert (plan.num_weight_slots, plan.num_gradient_slots, plan.num_fetches) == (0, 0, 0)
    assert plan.steps == tuple(StateStep(op) for op in ops)


def line(step: StateStep) -> str:
    slots = ["" if slot is None else str(slot) for slot in (step.weight_slot, step.gradient_slot)]
    fetches = [f"{fetch.kind} {fetch.layer} -> slot {fetch.slot}" for fetch in step.fetches]
    before = ", ".join([*fetches, *([] if step.start is None else [f"gradient {step.start}"])])
    return f"{step.op!s:<12} {slots[0]:>7} {slots[1]:>8}  {before:<36} {step.end or ''}".rstrip()


def test_golden_of_three_layers() -> None:
    plan = state_plan(stage_ops(1, 1, 1, 3, 0), dict.fromkeys(range(3), KINDS[-1]))
    assert (plan.num_weight_slots, plan.num_gradient_slots, plan.num_fetches) == (2, 2, 4)
    assert [line(step) for step in plan.steps] == [
        "F0 layer 0         0           weights 0 -> slot 0, weights 1 -> slot 1",
        "F0 layer 1         1           weights 2 -> slot 0",
        "F0 layer 2         0",
        "B0 layer 2         0        0  gradient zero                        reduce",
        "B0 layer 1         1        1  weights 0 -> slot 0, gradient zero   reduce",
        "B0 layer 0         0        0  gradient zero                        reduce",
    ]


class Counted(Sequence[LayerOp]):
    """Operations that count how often one of them is looked at."""

    def __init__(self, ops: list[LayerOp]) -> None:
        self.ops, self.looks = ops, 0

    def __len__(self) -> int:
        return len(self.ops)

    def __getitem__(self, index: Any) -> Any:
        found = self.ops[index]
        self.looks += len(found) if isinstance(index, slice) else 1
        return found


@pytest.mark.parametrize("ops", [stage_ops(1, 1, 64, 12, 0), stage_ops(4, 2, 32, 48, 1), breadth_first_ops(64, 12)])
def test_planning_takes_steps_in_proportion_to_the_operations(ops: list[LayerOp]) -> None:
    """Every operation is looked at a few times, however many there are and however far apart its layer's uses lie."""
    counted = Counted(ops)
    state_plan(counted, dict.fromkeys(layers_of(ops), KINDS[-1]))
    assert counted.looks <= 10 * len(ops)


# The replay itself: it must object to plans that are wrong.

OPS = stage_ops(1, 1, 2, 3, 0)
PLACES = dict.fromkeys(range(3), KINDS[-1])
PLAN = state_plan(OPS, PLACES)


def changed(index: int, **changes: object) -> StatePlan:
    steps = list(PLAN.steps)
    steps[index] = steps[index]._replace(**changes)  # type: ignore[arg-type]
    return replace(PLAN, steps=tuple(steps))


def moved_fetch(kind: str) -> StatePlan:
    """The first fetch of a kind that a later step needs is issued only by that step."""
    steps = list(PLAN.steps)
    at, fetch = next((i, f) for i, s in enumerate(steps) for f in s.fetches if f.kind == kind and f.layer != s.op.layer)
    steps[at] = steps[at]._replace(fetches=tuple(f for f in steps[at].fetches if f != fetch))
    user = next(i for i in range(at, len(steps)) if steps[i].op.layer == fetch.layer)
    steps[user] = steps[user]._replace(fetches=(fetch, *steps[user].fetches))
    return replace(PLAN, steps=tuple(steps))


def first_backward(start: str) -> int:
    return next(i for i, step in enumerate(PLAN.steps) if step.start == start)


WRONG = {
    "a fetch is missing": (changed(1, fetches=()), "not in its slot"),
    "a slot of another layer": (changed(1, weight_slot=0), "not in its slot"),
    "no slot": (changed(1, weight_slot=None), "needs none"),
    "a fetch into the slot in use": (changed(1, fetches=(Fetch("weights", 2, 1),)), "overwrites what this step needs"),
    "weights late": (moved_fetch("weights"), "a step before"),
    "a sum late": (moved_fetch("gradient"), "not issued as early"),
    "zero for a sum that goes on": (changed(first_backward("fetched"), start="zero"), "zeroes a sum"),
    "kept where another was": (changed(first_backward("fetched"), start="kept"), "who used the slot since"),
    "never reduced": (changed(len(OPS) - 1, end="keep"), "ends in keep"),
    "reduced early": (changed(first_backward("zero"), end="reduce"), "ends in reduce"),
    "not the last": (changed(len(OPS) - 1, is_last=False), "is_last"),
    "one slot more": (replace(PLAN, num_weight_slots=3), "slots for 3 layers"),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_replay_objects(name: str) -> None:
    plan, message = WRONG[name]
    Replay(PLAN, OPS, PLACES, NUM_STATE_SLOTS, False).run()
    with pytest.raises(WrongPlan, match=message):
        Replay(plan, OPS, PLACES, NUM_STATE_SLOTS, False).run()


def test_fewest_fetches_of_cases_done_by_hand() -> None:
    assert fewest_fetches([0, 1, 0, 1], 2) == 2
    assert fewest_fetches([0, 1, 0, 1], 1) == 4
    assert fewest_fetches([0, 1, 2, 0, 1, 2], 2) == 6  # 4, if some might be late
    assert fewest_fetches([0, 1, 2, 3, 0, 1, 2, 3], 3) == 6  # one slot keeps its layer for a while; in turn: 8

"""Swaps of all stages: figures against a recount of the schedule, and refusal of what cannot run."""

import dataclasses
from collections.abc import Iterable

import pytest
import swap_plans
from swap_plans import plan_stages, stage_table
from swap_runs import peak_records, stage_ops

from memo.errors import PlanError, ScheduleError
from memo.planner.swap import SwapPlan, swap_plan
from memo.spec.layer_ops import LayerOp, layer_ops
from memo.spec.schedule import Action, Pipeline, one_f_one_b

PIPELINES = [
    (Pipeline(1, 1, 1), 6),
    (Pipeline(1, 1, 3), 5),
    (Pipeline(2, 1, 4), 8),
    (Pipeline(4, 1, 8), 16),
    (Pipeline(4, 2, 8), 16),
    (Pipeline(3, 2, 6), 12),
]


def most_awaited(ops: Iterable[LayerOp]) -> int:
    """Most (microbatch, layer) pairs that are forwarded and not yet gone backward."""
    live = peak = 0
    for op in ops:
        live += 1 if op.kind == "F" else -1
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize(("pipeline", "num_layers"), PIPELINES, ids=str)
def test_records_are_what_is_awaited_but_does_not_fit_in_the_slots(pipeline: Pipeline, num_layers: int) -> None:
    for stage in plan_stages(pipeline, num_layers):
        actions = one_f_one_b(pipeline, stage.stage)
        awaited = most_awaited(layer_ops(pipeline, stage.stage, num_layers, actions))
        plan, passes = stage.plan, num_layers // pipeline.stages * pipeline.microbatches
        assert awaited - plan.num_slots <= plan.num_records <= awaited
        assert plan.num_records == peak_records(plan)
        assert stage.num_passes == passes == plan.num_offloads + plan.num_resident
        assert stage.in_flight == awaited // (num_layers // pipeline.stages // pipeline.chunks)


@pytest.mark.parametrize("num_layers", [1, 2, 3, 12, 80])
def test_one_stage_needs_the_papers_n_minus_2_records(num_layers: int) -> None:
    (stage,) = plan_stages(Pipeline(1, 1, 1), num_layers)
    assert stage.plan.num_records == stage.plan.num_offloads == max(0, num_layers - 2)


def test_the_table() -> None:
    stages = plan_stages(Pipeline(2, 1, 4), 8)
    assert stage_table(stages).splitlines() == [
        "stage  in flight  passes  offloads  resident  records",
        "    0          2      16        16         0        7",
        "    1          1      16         8         8        2",
    ]
    assert stage_table(stages, record_bytes=3 << 30).splitlines() == [
        "stage  in flight  passes  offloads  resident  records  host memory",
        "    0          2      16        16         0        7    21.00 GiB",
        "    1          1      16         8         8        2     6.00 GiB",
    ]


def test_more_slots_need_fewer_records() -> None:
    """The second slot lets copies run beside compute; from then on each one holds what a record held."""
    ops = stage_ops(2, 1, 4, 8, 0)
    records = [swap_plan(ops, max_slots).num_records for max_slots in (2, 3, 4, 8)]
    assert records == sorted(records, reverse=True) and records[-1] == 0


def test_layers_that_do_not_divide() -> None:
    with pytest.raises(PlanError, match="num_layers 7 is not divisible by 2"):
        plan_stages(Pipeline(2, 1, 4), 7)


def test_a_schedule_that_deadlocks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def deadlocking(pipeline: Pipeline, stage: int) -> list[Action]:
        return one_f_one_b(pipeline, 1 - stage)  # each waits for the other: F0 B0 F1 B1 against F0 F1 B0 B1

    monkeypatch.setattr(swap_plans, "one_f_one_b", deadlocking)
    with pytest.raises(ScheduleError, match="deadlocks: stage 0 at B0, stage 1 at F1"):
        plan_stages(Pipeline(2, 1, 2), 4)


def test_a_plan_that_loses_activations_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(ops: list[LayerOp]) -> SwapPlan:
        plan = swap_plan(ops)
        first = dataclasses.replace(plan.steps[0], offload=False, record=None)
        return dataclasses.replace(plan, steps=(first, *plan.steps[1:]))

    monkeypatch.setattr(swap_plans, "swap_plan", careless)
    with pytest.raises(PlanError, match="F0 layer 0 was never offloaded"):
        plan_stages(Pipeline(1, 1, 1), 4)

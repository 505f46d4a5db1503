"""The swap plan: goldens, counts over many schedules, and a validator that finds every corruption."""

import dataclasses
import random

import pytest
from schedules import simulate
from swap_runs import SCHEDULES, peak_records, stage_ops

from memo.errors import PlanError
from memo.planner.swap import SwapPlan, SwapStep, swap_plan
from memo.planner.swap_validator import validate
from memo.spec.layer_ops import LayerOp, in_sections, layer_ops
from memo.spec.schedule import Pipeline, forward_only, one_f_one_b

GOLDEN = """\
layer operations: 10, slots: 2, host records: 3; offloads: 3, prefetches: 3, resident: 2
 step  operation        slot  before          after
    0  F0 layer 0          0                  offload to record 0
    1  F0 layer 1          1                  offload to record 1
    2  F0 layer 2          0                  offload to record 2
    3  F0 layer 3          1
    4  F0 layer 4          0
    5  B0 layer 4          0                  prefetch B0 layer 2 from record 2
    6  B0 layer 3          1                  prefetch B0 layer 1 from record 1
    7  B0 layer 2          0  await record 2  prefetch B0 layer 0 from record 0
    8  B0 layer 1          1  await record 1
    9  B0 layer 0          0  await record 0"""

GOLDEN_1F1B = """\
layer operations: 12, slots: 2, host records: 3; offloads: 6, prefetches: 6, resident: 0
 step  operation        slot  before          after
    0  F0 layer 0          0                  offload to record 0
    1  F0 layer 1          1                  offload to record 1
    2  F1 layer 0          0                  offload to record 2, prefetch B0 layer 1 from record 1
    3  F1 layer 1          1                  offload to record 1, prefetch B0 layer 0 from record 0
    4  B0 layer 1          0  await record 1
    5  B0 layer 0          1  await record 0
    6  F2 layer 0          1                  offload to record 0, prefetch B1 layer 1 from record 1
    7  F2 layer 1          0                  offload to record 1, prefetch B1 layer 0 from record 2
    8  B1 layer 1          1  await record 1  prefetch B2 layer 1 from record 1
    9  B1 layer 0          0  await record 2  prefetch B2 layer 0 from record 0
   10  B2 layer 1          1  await record 1
   11  B2 layer 0          0  await record 0"""


def num_prefetches(plan: SwapPlan) -> int:
    return sum(step.prefetch for step in plan.steps)


def table(plan: SwapPlan) -> str:
    """The counts, then one line a step."""
    num_resident = sum(step.op.kind == "B" and not step.prefetch for step in plan.steps)  # still in their slot
    lines = [
        f"layer operations: {len(plan.steps)}, slots: {plan.num_slots}, host records: {plan.num_records};"
        f" offloads: {plan.num_offloads}, prefetches: {num_prefetches(plan)}, resident: {num_resident}",
        f"{'step':>5}  {'operation':<16} {'slot':>4}  {'before':<15} after",
    ]
    for index, step in enumerate(plan.steps):
        before = f"await record {step.record}" if step.prefetch else ""
        after = [f"offload to record {step.record}"] if step.offload else []
        if step.next_prefetch is not None:
            target = plan.steps[step.next_prefetch]
            after.append(f"prefetch {target.op} from record {target.record}")
        lines.append(f"{index:>5}  {step.op!s:<16} {step.slot:>4}  {before:<15} {', '.join(after)}".rstrip())
    return "\n".join(lines)


def test_goldens() -> None:
    assert table(swap_plan(stage_ops(1, 1, 1, 5, 0))) == GOLDEN
    assert table(swap_plan(stage_ops(2, 1, 3, 4, 0))) == GOLDEN_1F1B


@pytest.mark.parametrize("num_layers", range(1, 9))
@pytest.mark.parametrize("microbatches", [1, 2, 5])
def test_one_stage_uses_slot_i_mod_2_and_the_last_layers_stay(num_layers: int, microbatches: int) -> None:
    plan = swap_plan(stage_ops(1, 1, microbatches, num_layers, 0))
    validate(plan)
    assert [step.slot for step in plan.steps] == [step.op.layer % 2 for step in plan.steps]
    for step in plan.steps:
        assert step.offload == (step.op.kind == "F" and step.op.layer < num_layers - 2)
        assert step.prefetch == (step.op.kind == "B" and step.op.layer < num_layers - 2)
    assert plan.num_slots == min(num_layers, 2)
    assert plan.num_records == max(num_layers - 2, 0)  # the paper's (n - 2) S, whatever the microbatches


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_plans_of_pipelines(stages: int, chunks: int) -> None:
    for microbatches in (stages, 2 * stages, 4 * stages):
        pipeline = Pipeline(stages, chunks, microbatches)
        in_flight = simulate(pipeline, [one_f_one_b(pipeline, stage) for stage in range(stages)])
        for layers_per_chunk in (1, 2, 3):
            for stage in range(stages):
                ops = stage_ops(stages, chunks, microbatches, layers_per_chunk * stages * chunks, stage)
                plan = swap_plan(ops)
                validate(plan)
                assert [step.op for step in plan.steps] == ops
                assert plan.num_offloads == num_prefetches(plan)
                assert peak_records(plan) == plan.num_records <= in_flight[stage] * layers_per_chunk


def test_every_prefetch_leaves_the_other_slot_an_operation_to_hide_behind() -> None:
    for ops in SCHEDULES.values():
        steps = swap_plan(ops).steps
        issued = {step.next_prefetch: index for index, step in enumerate(steps) if step.next_prefetch is not None}
        assert all(index - issued[index] >= 2 for index, step in enumerate(steps) if step.prefetch)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_record_freed_first_is_reused_first(name: str) -> None:
    plan = swap_plan(SCHEDULES[name])
    freed: list[int] = []
    fresh = 0
    for step in plan.steps:
        if step.offload:
            expected = freed.pop(0) if freed else fresh
            assert step.record == expected
            fresh = max(fresh, expected + 1)
        if step.next_prefetch is not None:
            record = plan.steps[step.next_prefetch].record
            assert record is not None
            freed.append(record)
    assert fresh == plan.num_records


def test_one_layer_per_stage_needs_no_copies_when_two_microbatches_are_in_flight() -> None:
    plan = swap_plan(stage_ops(2, 1, 6, 2, 0))
    assert (plan.num_offloads, num_prefetches(plan), plan.num_records) == (0, 0, 0)


def test_forward_only_moves_nothing() -> None:
    pipeline = Pipeline(2, 2, 4)
    plan = swap_plan(layer_ops(pipeline, 0, 8, forward_only(pipeline)))
    validate(plan)
    assert (plan.num_slots, plan.num_records, plan.num_offloads, num_prefetches(plan)) == (1, 0, 0, 0)


def test_empty_schedule() -> None:
    plan = swap_plan([])
    validate(plan)
    assert plan == SwapPlan((), 0, 0)


def test_layers_of_an_interleaved_stage() -> None:
    pipeline = Pipeline(2, 2, 2)
    ops = layer_ops(pipeline, 1, 8, one_f_one_b(pipeline, 1))
    # Stage 1 holds virtual stages 1 and 3: layers 2, 3 and 6, 7.
    assert [str(op) for op in ops[:6]] == [
        *("F0 layer 2", "F0 layer 3"),
        *("F1 layer 2", "F1 layer 3"),
        *("F0 layer 6", "F0 layer 7"),
    ]
    assert [(op.kind, op.layer) for op in ops[6:8]] == [("B", 7), ("B", 6)]


def test_sections_go_up_in_forwards_and_down_in_backwards() -> None:
    ops = in_sections([LayerOp("F", 1, 3), LayerOp("B", 1, 3)], 3)
    assert [str(op) for op in ops] == [
        *("F1 layer 3 section 0", "F1 layer 3 section 1", "F1 layer 3 section 2"),
        *("B1 layer 3 section 2", "B1 layer 3 section 1", "B1 layer 3 section 0"),
    ]


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("sections", [1, 2, 5])
def test_plans_of_sections_and_of_one_slot(name: str, sections: int) -> None:
    """The two plans of layers that are swept: sections in two slots, and each part of keys and values in one."""
    plan = swap_plan(in_sections(SCHEDULES[name], sections))
    validate(plan)
    assert plan.num_slots <= 2
    keys = swap_plan(SCHEDULES[name], max_slots=1)
    validate(keys)
    assert keys.num_slots == 1


def test_indivisible_layers_are_refused() -> None:
    with pytest.raises(PlanError, match="num_layers 6 is not divisible by 4 = 2 stages x 2 chunks"):
        layer_ops(Pipeline(2, 2, 2), 0, 6, [])


def test_random_orders() -> None:
    """Any order in which backwards follow their forwards, not only those of pipelines."""
    for seed in range(60):
        rng = random.Random(seed)
        keys = [(m, layer) for m in range(rng.randint(1, 4)) for layer in range(rng.randint(1, 5))]
        waiting, running, ops = list(keys), [], []
        while waiting or running:
            if waiting and (not running or rng.random() < 0.5):
                running.append(waiting.pop(rng.randrange(len(waiting))))
                ops.append(LayerOp("F", *running[-1]))
            else:
                ops.append(LayerOp("B", *running.pop(rng.randrange(len(running)))))
        for max_slots in (1, 2, 3):
            plan = swap_plan(ops, max_slots)
            validate(plan)
            assert plan.num_records == peak_records(plan)


def with_step(plan: SwapPlan, index: int, **changes: object) -> SwapPlan:
    steps = list(plan.steps)
    steps[index] = dataclasses.replace(steps[index], **changes)  # type: ignore[arg-type]
    return dataclasses.replace(plan, steps=tuple(steps))


# Steps of GOLDEN, each corrupted in one place.
CORRUPTIONS: list[tuple[int, dict[str, object], str]] = [
    (0, {"offload": False, "record": None}, r"step 2 .* slot 0 is overwritten, but F0 layer 0 was never offloaded"),
    (0, {"offload": False}, r"step 0 .* record is 0, but it does not move"),
    (0, {"record": None}, r"step 0 .* record is None, but it moves"),
    (0, {"record": 3}, r"step 0 .* record 3 does not exist, the plan has 3"),
    (1, {"record": 0}, r"step 1 .* record 0 still holds F0 layer 0, not yet prefetched"),
    (0, {"slot": 2}, r"step 0 .* slot 2 does not exist, the plan has 2"),
    (3, {"slot": 0}, r"step 4 .* F0 layer 3 was never offloaded"),
    (0, {"op": LayerOp("F", 1, 0)}, r"step 7 .* record 0 holds F1 layer 0"),
    (1, {"op": LayerOp("F", 0, 0)}, r"step 1 .* this forward occurs twice"),
    (5, {"op": LayerOp("B", 1, 4)}, r"step 5 .* a backward before its forward"),
    (8, {"op": LayerOp("B", 0, 3)}, r"step 6 .* record 1 holds F0 layer 1"),
    (5, {"slot": 1}, r"step 5 .* slot 1 holds F0 layer 3"),
    (5, {"next_prefetch": None}, r"step 7 .* nobody issued its prefetch"),
    (5, {"next_prefetch": 9}, r"step 5 .* prefetches B0 layer 0|step 7"),
    (5, {"next_prefetch": 8}, r"step 5 .* for step 8 in slot 1, but frees slot 0"),
    (5, {"next_prefetch": 5}, r"step 5 .* not a later step"),
    (5, {"next_prefetch": 10}, r"step 5 .* not a later step of 10"),
    (2, {"next_prefetch": 7}, r"step 4 .* overwrites slot 0 while step 7"),
    (4, {"next_prefetch": 7}, r"step 4 .* slot 0 is overwritten, but F0 layer 4 was never offloaded"),
    (2, {"next_prefetch": 5}, r"step 2 .* for step 5, B0 layer 4, which reads no record"),
    (7, {"record": 1}, r"step 5 .* record 1 holds F0 layer 1"),
    (7, {"prefetch": False, "record": None}, r"step 5 .* which reads no record"),
    (4, {"prefetch": True, "record": 0}, r"a forward awaits a prefetch"),
    (5, {"offload": True, "record": 0}, r"a backward offloads"),
]


@pytest.mark.parametrize(("index", "changes", "message"), CORRUPTIONS)
def test_the_validator_names_a_corruption(index: int, changes: dict[str, object], message: str) -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 5, 0))
    with pytest.raises(PlanError, match=message):
        validate(with_step(plan, index, **changes))


def test_the_validator_sees_copies_for_nothing_and_missing_ends() -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 2, 0))
    wasteful = dataclasses.replace(with_step(plan, 0, offload=True, record=0), num_records=1)
    with pytest.raises(PlanError, match="record 0 keeps F0 layer 0 to the end"):
        validate(wasteful)
    twice = dataclasses.replace(plan, steps=(*plan.steps, plan.steps[-1]))
    with pytest.raises(PlanError, match=r"step 4 \(B0 layer 0\): this backward occurs twice"):
        validate(twice)


def test_no_swap_of_two_steps_goes_unseen() -> None:
    """Exchanging any two operations of a plan, without planning again, is refused or still a sound plan."""
    plan = swap_plan(SCHEDULES["pp 2 stage 0, 8 layers, 4 microbatches"])
    refused = 0
    for first in range(len(plan.steps)):
        for second in range(first + 1, min(first + 6, len(plan.steps))):
            steps: list[SwapStep] = list(plan.steps)
            steps[first] = dataclasses.replace(steps[first], op=plan.steps[second].op)
            steps[second] = dataclasses.replace(steps[second], op=plan.steps[first].op)
            try:
                validate(dataclasses.replace(plan, steps=tuple(steps)))
            except PlanError:
                refused += 1
            else:
                pytest.fail(f"exchanging steps {first} and {second} went unseen")
    assert refused > 0

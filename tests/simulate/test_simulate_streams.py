"""The streams of one stage, right by hand; tests of benchmarks/swap_plans.py look at every span."""

from itertools import product

import pytest

from memo.planner.swap import SwapPlan, SwapStep, swap_plan
from memo.planner.swap_validator import validate
from memo.simulate.streams import LayerTimes, StageStreams
from memo.simulate.swapping import Sweeping, moves_and_records, stage_plan
from memo.spec.layer_ops import LayerOp, layer_ops
from memo.spec.schedule import Pipeline, one_f_one_b


def plan_of(pipeline: Pipeline, stage: int, num_layers: int) -> SwapPlan:
    return swap_plan(layer_ops(pipeline, stage, num_layers, one_f_one_b(pipeline, stage)))


def test_copies_that_take_turns_stop_compute() -> None:
    """On a CPU every copy adds its whole time."""
    plan = plan_of(Pipeline(1, 1, 1), 0, 4)
    assert (plan.num_offloads, sum(step.prefetch for step in plan.steps)) == (2, 2)
    streams = StageStreams(plan, LayerTimes(1.0, 2.0, 0.5, 0.25, copies_overlap=False))
    end_s = 0.0
    for _ in plan.steps:
        end_s = streams.next_op(end_s)[2]
    assert end_s == pytest.approx(4 * 1.0 + 4 * 2.0 + 2 * 0.5 + 2 * 0.25)
    assert streams.stall_s == pytest.approx(2 * 0.5 + 2 * 0.25)


def test_a_late_start_is_no_stall() -> None:
    """Waiting for another stage is not waiting for a copy."""
    plan = plan_of(Pipeline(1, 1, 1), 0, 2)
    streams = StageStreams(plan, LayerTimes(1.0, 2.0, 0.5, 0.5))
    assert streams.next_op(7.0)[1] == 7.0
    assert streams.stall_s == 0.0


def test_a_prefetch_waits_until_its_record_is_written() -> None:
    """Layer 0 leaves slot 0 for 5 s and comes back into slot 1, which is free at 4 s: only the record holds it up.

    The planner never brings a layer back into another slot than a copy has just used; a plan may.
    """
    steps = (
        SwapStep(LayerOp("F", 0, 0), 0, offload=True, record=0),
        SwapStep(LayerOp("F", 0, 1), 1),
        SwapStep(LayerOp("B", 0, 1), 1, next_prefetch=3),
        SwapStep(LayerOp("B", 0, 0), 1, prefetch=True, record=0),
    )
    plan = SwapPlan(steps, num_slots=2, num_records=1)
    validate(plan)
    streams = StageStreams(plan, LayerTimes(1.0, 2.0, 5.0, 0.5))
    starts_s, copies = [], []
    for _ in plan.steps:
        _, start_s, _, issued = streams.next_op(0.0)
        starts_s.append(start_s)
        copies += [(copy.row, copy.start_s, copy.end_s) for copy in issued]
    assert copies == [("offload", 1.0, 6.0), ("prefetch", 6.0, 6.5)]
    assert starts_s == [0.0, 1.0, 2.0, 6.5]


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(1, 1, 1),
        Pipeline(1, 1, 9),
        Pipeline(3, 1, 20),
        Pipeline(4, 1, 7),
        Pipeline(4, 3, 36),
        Pipeline(1, 4, 16, breadth_first=True),
    ],
    ids=str,
)
def test_moves_of_all_microbatches_follow_from_few(pipeline: Pipeline) -> None:
    """Also of a few sections, where layers are swept, those of many."""
    num_layers = 2 * pipeline.stages * pipeline.chunks // (2 if pipeline.breadth_first else 1)
    in_chunk = num_layers // (pipeline.stages * pipeline.chunks)
    for stage, sections, again in product(range(pipeline.stages), (1, 2, 5), range(in_chunk + 1)):
        sweep = Sweeping(sections, frozenset(layer for layer in range(num_layers) if layer % in_chunk < again))
        plan = stage_plan(pipeline, stage, num_layers, sweep)
        assert moves_and_records(pipeline, stage, num_layers, sweep) == (plan.num_offloads, plan.num_records)


def test_records_on_disk_are_copied_at_its_rate_one_after_the_other() -> None:
    """Layers of 1 and 2 seconds; of four records the two that wait longest take 3 and 5 seconds on disk."""
    pipeline = Pipeline(1, 1, 1)
    plan = swap_plan(layer_ops(pipeline, 0, 6, one_f_one_b(pipeline, 0)))
    streams = StageStreams(plan, LayerTimes(1.0, 2.0, 0.5, 0.5, write_s=3.0, read_s=5.0, layers_in_memory=2))
    rows: dict[str, list[tuple[int, float, float]]] = {}
    for _ in plan.steps:
        for copy in streams.next_op(0.0)[3]:
            rows.setdefault(copy.row, []).append((copy.step.op.layer, copy.start_s, copy.end_s))
    assert rows["disk"] == [(0, 1.0, 4.0), (1, 4.0, 7.0), (1, 16.0, 21.0), (0, 21.0, 26.0)]
    assert [layer for layer, _, _ in rows["offload"]] == [0, 1, 2, 3]
    assert rows["offload"][:2] == rows["disk"][:2] and rows["prefetch"][2:] == rows["disk"][2:]
    assert streams.stall_s > 0 and LayerTimes(1.0, 2.0).num_on_disk(4) == 0

"""The streams of one stage: equal to the timeline's where both apply, and right by hand."""

import random

import pytest

from memo.planner.swap import SwapPlan, swap_plan
from memo.report.timeline import StepTimes, simulate_swaps, stalled_s
from memo.simulate.streams import LayerTimes, StageStreams
from memo.spec.layer_ops import layer_ops
from memo.spec.schedule import Pipeline, one_f_one_b


def plan_of(pipeline: Pipeline, stage: int, num_layers: int) -> SwapPlan:
    return swap_plan(layer_ops(pipeline, stage, num_layers, one_f_one_b(pipeline, stage)))


@pytest.mark.parametrize(
    ("pipeline", "num_layers"), [(Pipeline(1, 1, 3), 5), (Pipeline(2, 1, 5), 8), (Pipeline(2, 2, 4), 8)]
)
def test_streams_equal_the_timeline(pipeline: Pipeline, num_layers: int) -> None:
    """memo.report.timeline draws one stage alone: every operation and copy at the same time, to the last bit."""
    generator = random.Random(0)
    for stage in range(pipeline.stages):
        plan = plan_of(pipeline, stage, num_layers)
        for _ in range(5):
            times = [generator.uniform(0.1, 3.0) for _ in range(4)]
            streams = StageStreams(plan, LayerTimes(*times))
            found = []
            for _ in plan.steps:
                step, start_s, end_s, copies = streams.next_op(0.0)
                found.append(("compute", step, start_s, end_s))
                found += [(copy.row, copy.step, copy.start_s, copy.end_s) for copy in copies]
            spans = simulate_swaps(plan, StepTimes(*times))
            expected = [(span.row, span.step, span.start_s, span.end_s) for span in spans if span.row != "wait"]
            assert found == expected
            assert streams.stall_s == pytest.approx(stalled_s(spans))


def test_copies_that_take_turns_stop_compute() -> None:
    """On a CPU every copy adds its whole time."""
    plan = plan_of(Pipeline(1, 1, 1), 0, 4)
    assert (plan.num_offloads, plan.num_prefetches) == (2, 2)
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

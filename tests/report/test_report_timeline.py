"""The timeline: no stall where copies are shorter than layers, streams in order, and what is drawn."""

from itertools import pairwise

import pytest
from swap_runs import SCHEDULES, stage_ops

from memo.planner.swap import LayerOp, SwapPlan, swap_plan
from memo.report.timeline import ROWS, StepTimes, simulate_swaps, stalled_s, timeline

DRAWN = """\
compute  |F0:0---|F0:1---|F0:2---|F0:3---|B0:3-----------|B0:2-----------|B0:1-----------|B0:0-----------
offload  ........|0:0----|0:1----........................................................................
prefetch ................................................|0:1------------|0:0------------................
12 s; compute waits 0 s for copies"""


def test_drawing() -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 4, 0))
    assert timeline(plan, StepTimes(1.0, 2.0, 1.0, 2.0), width=96) == DRAWN


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 24])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_copies_as_long_as_their_layer_hide_on_one_stage(num_layers: int, microbatches: int) -> None:
    """The paper's condition: offload within a forward, prefetch within a backward, and compute never waits."""
    plan = swap_plan(stage_ops(1, 1, microbatches, num_layers, 0))
    spans = simulate_swaps(plan, StepTimes(1.0, 2.0, 1.0, 2.0))
    assert stalled_s(spans) == 0.0
    assert max(span.end_s for span in spans) == 3.0 * num_layers * microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_half_as_long_as_a_forward_hide_everywhere(name: str) -> None:
    """Under 1F1B a slot's offload and the prefetch into it follow each other within one operation."""
    assert stalled_s(simulate_swaps(swap_plan(SCHEDULES[name]), StepTimes(1.0, 2.0, 0.5, 0.5))) == 0.0


def test_slow_copies_stall_compute() -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 6, 0))
    # Layer 2 waits for the offload of layer 0 (3 - 1 s late), layers 3, 4, 5 for the next: 2 s each.
    assert stalled_s(simulate_swaps(plan, StepTimes(1.0, 2.0, 3.0, 0.0))) == pytest.approx(2.0 * 4)


def test_a_single_slot_hides_nothing() -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 4, 0), max_slots=1)
    times = StepTimes(1.0, 2.0, 0.25, 0.5)
    assert stalled_s(simulate_swaps(plan, times)) == pytest.approx(3 * (0.25 + 0.5))


@pytest.mark.parametrize("name", SCHEDULES)
def test_streams_work_in_order_and_move_what_the_plan_says(name: str) -> None:
    plan = swap_plan(SCHEDULES[name])
    spans = simulate_swaps(plan, StepTimes(1.0, 2.0, 1.5, 2.5))
    for row in ROWS:
        own = [span for span in spans if span.row == row]
        assert all(first.end_s <= second.start_s for first, second in pairwise(own))
    counts = {row: sum(span.row == row for span in spans) for row in ROWS}
    assert counts == {"compute": len(plan.steps), "offload": plan.num_offloads, "prefetch": plan.num_prefetches}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_copy_starts_before_what_it_needs(name: str) -> None:
    spans = simulate_swaps(swap_plan(SCHEDULES[name]), StepTimes(1.0, 2.0, 1.5, 2.5))
    at = {(span.row, span.step.op): span for span in spans}
    for span in spans:
        step = span.step
        if span.row == "offload":
            assert span.start_s >= at["compute", step.op].end_s
        if span.row == "prefetch":
            assert span.start_s >= at["offload", LayerOp("F", *step.op.key)].end_s
            assert span.end_s <= at["compute", step.op].start_s
            earlier = [other for other in spans if other.step.slot == step.slot and other.row != "prefetch"]
            # Everything that used the slot before this backward, its offload included, is over.
            before = [other for other in earlier if other.start_s < at["compute", step.op].start_s]
            assert all(other.end_s <= span.start_s for other in before)


def test_an_empty_plan() -> None:
    assert timeline(SwapPlan((), 0, 0), StepTimes(1, 1, 1, 1), width=3).splitlines()[0] == "compute  ..."

"""The timeline: no stall where copies are shorter than layers, streams in order, and what is drawn."""

from itertools import pairwise

import pytest
from swap_drawing import draw_text
from swap_plans import simulate_swaps
from swap_runs import SCHEDULES, stage_ops

from memo.planner.swap import SwapPlan, SwapStep, swap_plan
from memo.report.timeline import (
    ROWS,
    Row,
    SwapSpan,
    Tenancy,
    copied_s,
    hidden_share,
    stalled_s,
    tenancies,
)
from memo.simulate.streams import LayerTimes
from memo.spec.layer_ops import LayerOp


@pytest.mark.parametrize("num_layers", [1, 2, 3, 6, 24])
@pytest.mark.parametrize("microbatches", [1, 3])
def test_copies_as_long_as_their_layer_hide_on_one_stage(num_layers: int, microbatches: int) -> None:
    """The paper's condition: offload within a forward, prefetch within a backward, and compute never waits."""
    plan = swap_plan(stage_ops(1, 1, microbatches, num_layers, 0))
    spans = simulate_swaps(plan, LayerTimes(1.0, 2.0, 1.0, 2.0))
    assert stalled_s(spans) == 0.0
    assert max(span.end_s for span in spans) == 3.0 * num_layers * microbatches


@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_half_as_long_as_a_forward_hide_everywhere(name: str) -> None:
    """Under 1F1B a slot's offload and the prefetch into it follow each other within one operation."""
    assert stalled_s(simulate_swaps(swap_plan(SCHEDULES[name]), LayerTimes(1.0, 2.0, 0.5, 0.5))) == 0.0


def test_slow_copies_stall_compute() -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 6, 0))
    # Layer 2 waits for the offload of layer 0 (3 - 1 s late), layers 3, 4, 5 for the next: 2 s each.
    assert stalled_s(simulate_swaps(plan, LayerTimes(1.0, 2.0, 3.0, 0.0))) == pytest.approx(2.0 * 4)


def test_a_single_slot_hides_nothing() -> None:
    plan = swap_plan(stage_ops(1, 1, 1, 4, 0), max_slots=1)
    times = LayerTimes(1.0, 2.0, 0.25, 0.5)
    assert stalled_s(simulate_swaps(plan, times)) == pytest.approx(3 * (0.25 + 0.5))


@pytest.mark.parametrize("name", SCHEDULES)
def test_streams_work_in_order_and_move_what_the_plan_says(name: str) -> None:
    plan = swap_plan(SCHEDULES[name])
    spans = simulate_swaps(plan, LayerTimes(1.0, 2.0, 1.5, 2.5))
    for row in ROWS:
        own = [span for span in spans if span.row == row]
        assert all(first.end_s <= second.start_s for first, second in pairwise(own))
    counts = {row: sum(span.row == row for span in spans) for row in ROWS}
    assert counts == {"compute": len(plan.steps), "offload": plan.num_offloads, "prefetch": plan.num_prefetches}


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_copy_starts_before_what_it_needs(name: str) -> None:
    spans = simulate_swaps(swap_plan(SCHEDULES[name]), LayerTimes(1.0, 2.0, 1.5, 2.5))
    at = {(span.row, span.step.op): span for span in spans}
    for span in spans:
        step = span.step
        if span.row == "offload":
            assert span.start_s >= at["compute", step.op].end_s
        if span.row == "prefetch":
            assert span.start_s >= at["offload", LayerOp("F", *step.op.key)].end_s
            assert span.end_s <= at["compute", step.op].start_s
            earlier = [o for o in spans if o.step.slot == step.slot and o.row in ("compute", "offload")]
            # Everything that used the slot before this backward, its offload included, is over.
            before = [other for other in earlier if other.start_s < at["compute", step.op].start_s]
            assert all(other.end_s <= span.start_s for other in before)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("copy_s", [0.5, 1.5, 3.0])
def test_waits_fill_the_gaps_of_compute(name: str, copy_s: float) -> None:
    spans = simulate_swaps(swap_plan(SCHEDULES[name]), LayerTimes(1.0, 2.0, copy_s, copy_s))
    compute = sorted((s for s in spans if s.row in ("compute", "wait")), key=lambda s: s.start_s)
    assert all(first.end_s == second.start_s for first, second in pairwise(compute))


def span(row: Row, start_s: float, end_s: float, kind: str = "F", layer: int = 0, slot: int = 0) -> SwapSpan:
    step = SwapStep(LayerOp("F" if kind == "F" else "B", 0, layer), slot)
    return SwapSpan(row, step, start_s, end_s)


def test_hidden_share_counts_what_lies_under_layers() -> None:
    layers = [span("compute", 0, 1), span("wait", 1, 2), span("compute", 2, 3), span("compute", 3, 4)]
    assert hidden_share(layers) == 1.0  # nothing is copied
    # 0.5 of the first second, nothing of the second, all of the third and a quarter of the fourth.
    assert hidden_share([*layers, span("offload", 0.5, 3.25)]) == pytest.approx((0.5 + 1 + 0.25) / 2.75)
    both = [*layers, span("offload", 2, 4), span("prefetch", 4, 6)]
    assert copied_s(both) == 4 and hidden_share(both) == 0.5
    assert hidden_share([*layers, span("prefetch", 1, 2)]) == 0.0
    assert stalled_s(both) == 1


def test_hidden_share_agrees_with_the_stalls_where_copies_never_overlap() -> None:
    """With one slot each copy is waited for at once, so nothing is hidden; with two and short copies all is."""
    ops, times = stage_ops(1, 1, 1, 6, 0), LayerTimes(1.0, 2.0, 0.5, 0.5)
    assert hidden_share(simulate_swaps(swap_plan(ops, max_slots=1), times)) == 0.0
    assert hidden_share(simulate_swaps(swap_plan(ops), times)) == 1.0


def test_tenancies_by_hand() -> None:
    """Four layers: 0 and 1 leave with the offload and come back with the prefetch; 2 and 3 stay."""
    spans = simulate_swaps(swap_plan(stage_ops(1, 1, 1, 4, 0)), LayerTimes(1.0, 2.0, 0.5, 1.0))
    expected = {
        Tenancy(0, (0, 0), 0, 1.5),
        Tenancy(1, (0, 1), 1, 2.5),
        Tenancy(0, (0, 2), 2, 8),
        Tenancy(1, (0, 3), 3, 6),
        Tenancy(1, (0, 1), 6, 10),
        Tenancy(0, (0, 0), 8, 12),
    }
    assert set(tenancies(spans)) == expected and len(tenancies(spans)) == len(expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_slot_has_one_tenant_at_a_time(name: str) -> None:
    plan = swap_plan(SCHEDULES[name])
    found = tenancies(simulate_swaps(plan, LayerTimes(1.0, 2.0, 1.5, 2.5)))
    assert len(found) == plan.num_offloads + len(plan.steps) // 2
    for slot in range(plan.num_slots):
        own = sorted((t for t in found if t.slot == slot), key=lambda t: t.start_s)
        assert all(first.end_s <= second.start_s for first, second in pairwise(own))


def test_a_drawing_begins_where_the_spans_do() -> None:
    shifted = draw_text([span("compute", 5, 6), span("compute", 6, 7, "B")], width=12).splitlines()
    assert shifted[0] == "compute  |F0:0-|B0:0-"
    assert shifted[-1] == "2 s; compute waits 0 s for copies"


def test_an_empty_plan() -> None:
    spans = simulate_swaps(SwapPlan((), 0, 0), LayerTimes(1, 1, 1, 1))
    assert draw_text(spans, width=3).splitlines()[0] == "compute  ..."

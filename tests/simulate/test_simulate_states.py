"""States that stream in simulated time: slots, links shared with activations, updates on the CPU."""

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.simulate import predict_step
from memo.simulate.kernels import Kernels
from memo.simulate.state_traffic import count_traffic, stage_state_plan, state_traffic
from memo.simulate.states import StateTimes, state_times
from memo.simulate.trace import SimulatedStep, Span, simulate_step
from memo.spec.placement import StatePlacement
from memo.spec.schedule import Pipeline

MACHINE = HARDWARE["a800-80"]
SLOW = replace(MACHINE, offload_gb_per_s=1.0, prefetch_gb_per_s=1.0)


def run(**values: Any) -> RunConfig:
    base = {"seq_length": 8192, "gbs": 8, "num_layers": 8, "device": "cuda", "offload_alpha": "off", "tp": 8}
    return RunConfig(model=preset("gpt-7b")).override(base | values)


def times_of(config: RunConfig, world_size: int = 8) -> StateTimes:
    found = state_times(config, Kernels(MACHINE, "bf16"), world_size, 0)
    assert found is not None
    return found


def test_the_cpu_updates_moments_in_bf16_with_less_traffic() -> None:
    """28 bytes a parameter, and 2 for the copy of the weights; 4 less for each moment in bf16."""
    states: dict[str, Any] = {"offload_states": "optimizer"}
    both = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    plain_s, one_s, both_s = (
        times_of(run(**states, **dtypes)).cpu_s for dtypes in ({}, {"exp_avg_dtype": "bf16"}, both)
    )
    assert one_s / plain_s == pytest.approx(26 / 30) and both_s / plain_s == pytest.approx(22 / 30)


ORDER = "gradient_accumulation_order"
LAYOUTS = (
    {"tp": 8},
    {"tp": 2},
    {"tp": 2, ORDER: "breadth_first"},
    {"pp": 2, "tp": 1},
    {"pp": 2, "vpp": 2, "tp": 1},
    {"tp": 2, "cp": 2},
)
SHARES = (
    {},
    {"offload_states": "optimizer"},
    {"offload_states": "all"},
    {"offload_states": "all", "optimizer_offload_fraction": 0.5, "gradient_offload_fraction": 0.25},
    {"offload_states": "all", "offload_weight_copy": False, "clip_grad": 0.0},
)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("sharding", ["optim", "optim_grads", "optim_grads_params"])
def test_the_prediction_is_the_simulation_and_no_resource_takes_longer(layout: dict[str, Any], sharding: str) -> None:
    """Predicted from the first microbatches to 0.3 % of the run of all. Resources bound it from below."""
    for shares, alpha, batch in product(SHARES, ("off", 0.5), (8, 64)):
        values = {**layout, **shares, "gbs": batch, "offload_alpha": alpha, "data_parallel_sharding_strategy": sharding}
        predicted = predict_step(run(**values), 8, MACHINE)
        simulated = simulate_step(run(**values), 8, MACHINE)
        assert predicted.step_time_s == pytest.approx(simulated.step_time_s, rel=3e-3), values
        assert sum(predicted.seconds.values()) == pytest.approx(predicted.step_time_s, rel=1e-9)
        assert min(predicted.seconds.values()) > -1e-9
        assert max(predicted.resources.values()) <= simulated.step_time_s * (1 + 1e-9), values
        check_rows(simulated)


def check_rows(step: SimulatedStep) -> None:
    rows = defaultdict(list)
    for span in step.spans:
        rows[span.stage, span.row].append((span.start_s, span.end_s))
    for spans in rows.values():
        spans.sort()
        assert all(after >= end - 1e-9 for (_, end), (after, _) in pairwise(spans))


def spans_of(step: SimulatedStep, row: str, name: str) -> list[Span]:
    return [span for span in step.spans if span.row == row and span.name.startswith(name)]


def test_weights_are_there_before_their_layer_and_come_one_layer_ahead() -> None:
    step = simulate_step(run(offload_states="all"), 8, MACHINE)
    fills = [span for span in spans_of(step, "prefetch", "weights ") if not span.name.endswith("ends")]
    layers = spans_of(step, "compute", "")
    ops = [span for span in layers if " layer " in span.name]
    by_layer = {span.name: span for span in ops}
    first = {int(span.name.split()[1]): span for span in reversed(fills)}
    for layer in range(8):
        assert first[layer].end_s <= by_layer[f"F0 layer {layer}"].start_s + 1e-12
    assert first[4].start_s >= by_layer["F0 layer 2"].end_s  # into the slot that layer 2 leaves
    assert first[4].start_s < by_layer["F0 layer 3"].end_s
    # Of 8 microbatches forward and backward pass 8 layers; a turn finds two of them in place.
    assert len(fills) == 8 + 15 * 6


def test_sums_of_as_many_layers_as_slots_never_leave_the_device() -> None:
    """Two of eight layers have their gradients in slots: nobody else takes a slot between two microbatches."""
    config = run(gbs=4, offload_states="optimizer", optimizer_offload_fraction=0.25, gradient_offload_fraction=0.25)
    times = times_of(config)
    assert (times.pipeline.microbatches, times.placement.gradients, times.whole_out_s > 0) == (4, 2, True)
    assert (times.traffic.sums_out, times.traffic.sums_in) == (0, 0)
    step = simulate_step(config, 8, MACHINE)
    assert not [span for span in step.spans if span.row == "prefetch" and span.name.startswith("gradient")]
    assert len([span for span in spans_of(step, "offload", "gradient ") if "ends" not in span.name]) == 2


PIPELINES = [
    *(Pipeline(1, 1, count) for count in (1, 2, 5, 9)),
    *(Pipeline(stages, 1, count) for stages in (2, 3, 4) for count in (1, 7, 24)),
    *(Pipeline(stages, 2, stages * rounds) for stages in (2, 3) for rounds in (1, 4, 7)),
    *(Pipeline(1, 6, count, breadth_first=True) for count in (1, 2, 7, 30)),
]


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
@pytest.mark.parametrize("sharding", [(False, False), (True, False), (True, True)])
def test_traffic_counted_on_fewer_microbatches_is_that_of_all(pipeline: Pipeline, sharding: tuple[bool, bool]) -> None:
    """To the last copy, on every stage, of placements from nothing to everything in host memory."""
    for optimizer, gradients, weights in [(0, 0, 0), (6, 6, 6), (6, 0, 3), (6, 3, 0), (4, 4, 1), (3, 2, 2), (1, 1, 1)]:
        placement = StatePlacement(6, optimizer, gradients, weights, *sharding)
        for stage in range(pipeline.stages):
            whole = count_traffic(stage_state_plan(pipeline, stage, placement), placement)
            assert state_traffic(pipeline, stage, placement) == whole, (placement, stage)


def copies_of(step: SimulatedStep) -> dict[str, int]:
    """How many spans of each row move states."""
    rows = [(span.row, span.name.split()[0]) for span in step.spans if not span.name.endswith(" ends")]
    return {f"{row} {kind}": rows.count((row, kind)) for row, kind in set(rows)}


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if "pp" not in layout])
@pytest.mark.parametrize("sharding", ["optim", "optim_grads", "optim_grads_params"])
def test_what_runs_is_what_is_counted(layout: dict[str, Any], sharding: str) -> None:
    """On one stage, so that every span is of the same rank."""
    for shares in SHARES:
        config = run(**layout, **shares, gbs=16, data_parallel_sharding_strategy=sharding)
        step, found = simulate_step(config, 8, MACHINE), state_times(config, Kernels(MACHINE, "bf16"), 8, 0)
        if found is None:
            continue
        spans, traffic, at = copies_of(step), found.traffic, found.placement
        uploads = 0 if at.shards_weights else at.optimizer - at.weights
        assert spans.get("prefetch weights", 0) == traffic.fills + uploads
        assert spans.get("prefetch gradient", 0) == traffic.sums_in + traffic.shards_in
        assert spans.get("offload gradient", 0) == traffic.sums_out + traffic.shards_out
        if found.gather_s:
            assert spans.get("data gather", 0) - 1 == traffic.gathers + uploads  # and the new weights of the ends
            assert spans["data reduce"] == traffic.reductions + found.num_reduced_apart


def test_a_slow_link_is_what_binds() -> None:
    fast, slow = (predict_step(run(offload_states="all"), 8, machine) for machine in (MACHINE, SLOW))
    assert slow.binding in ("h2d", "d2h") and slow.resources["h2d"] > 10 * fast.resources["h2d"] * 0.99
    assert slow.step_time_s >= slow.resources[slow.binding]
    assert predict_step(run(), 8, SLOW).binding == "compute"


def test_a_slow_cpu_is_what_binds() -> None:
    machine = replace(MACHINE, host_memory_gb_per_s=1.0)
    step = predict_step(run(offload_states="optimizer"), 8, machine)
    assert step.binding == "cpu optimizer"
    adam_bytes = (28 + 2) * 8 * 201_326_592 / 8  # of a rank, layers alone
    assert step.resources["cpu optimizer"] >= adam_bytes / (0.7e9 / 8)


@pytest.mark.parametrize("states", ["optimizer", "all"])
def test_updates_hide_under_the_next_forward_or_without_clipping_under_backward(states: str) -> None:
    """With clipping they take 0.17 s of the first forward, which would take 0.04 s without them, and not 0.17 s more
    after the last backward."""
    clipped, free = (simulate_step(run(offload_states=states, clip_grad=clip), 8, MACHINE) for clip in (1.0, 0.0))
    updated_s = {
        span.name.split()[1]: span.end_s for span in spans_of(clipped, "cpu", "update ") if span.name[-1] != "s"
    }
    forwards = spans_of(clipped, "compute", "F0 layer")
    assert len(updated_s) == len(forwards) == 8
    assert all(span.start_s >= updated_s[span.name.split()[-1]] for span in forwards)
    assert forwards[-1].end_s < 1.1 * max(updated_s.values())
    last_backward = max(span.end_s for span in spans_of(free, "compute", "B"))
    assert sum(span.start_s < last_backward for span in spans_of(free, "cpu", "update")) >= 2
    assert free.step_time_s < clipped.step_time_s < free.step_time_s + max(updated_s.values())


def test_two_records_make_gradients_wait_for_the_cpu() -> None:
    """Without clipping, and with one microbatch, the third gradient goes where the first was, once that is updated."""
    machine = replace(MACHINE, host_memory_gb_per_s=2.0)
    step = simulate_step(run(offload_states="all", clip_grad=0.0, gbs=1), 8, machine)
    gradients = sorted((s for s in spans_of(step, "offload", "gradient ") if s.start_s > 0), key=lambda s: s.start_s)
    updates = sorted(spans_of(step, "cpu", "update "), key=lambda s: s.start_s)
    gradients = gradients[-8:]
    for index in range(2, 8):
        assert gradients[index].start_s >= updates[index - 2].end_s - 1e-12


def test_gradients_of_several_microbatches() -> None:
    """ZeRO-1 brings the whole sum away and back, ZeRO-2 each microbatch's shard."""
    values = {"tp": 2, "gbs": 16, "offload_states": "all"}
    one, two = (times_of(run(**values, data_parallel_sharding_strategy=name)) for name in ("optim", "optim_grads"))
    assert one.whole_out_s == pytest.approx(4 * one.shard_out_s) and two.whole_out_s == 0.0
    assert one.d2h_s - one.ends_out_s == pytest.approx(8 * (3 * one.whole_out_s + one.shard_out_s))
    assert two.d2h_s - two.ends_out_s == pytest.approx(8 * 4 * two.shard_out_s)
    assert times_of(run(tp=2, gbs=4, offload_states="all")).whole_out_s == 0.0


def test_masters_cost_twice_the_bytes_of_a_copy() -> None:
    copy, masters = (times_of(run(offload_states="all", offload_weight_copy=kept)) for kept in (True, False))
    assert masters.fill_s == pytest.approx(2 * copy.fill_s)


def test_zero_3_gathers_and_zero_2_does_not() -> None:
    values = {"tp": 2, "gbs": 8}
    two, three = (
        simulate_step(run(**values, data_parallel_sharding_strategy=name), 8, MACHINE)
        for name in ("optim_grads", "optim_grads_params")
    )
    assert not spans_of(two, "data", "gather 3") and spans_of(three, "data", "gather 3")
    assert len(spans_of(two, "data", "reduce 3")) == len(spans_of(three, "data", "reduce 3")) == 2
    assert not spans_of(three, "prefetch", "") and not spans_of(three, "cpu", "")


def test_on_a_cpu_copies_and_compute_take_turns() -> None:
    config = run(tp=1, gbs=1, device="cpu", params_dtype="fp32", num_layers=4, seq_length=256, offload_states="all")
    step = simulate_step(config, 1, HARDWARE["cpu"])
    computed = [span for span in spans_of(step, "compute", "") if "layer" in span.name]
    copies = [span for span in step.spans if span.row in ("offload", "prefetch")]
    assert len(copies) > 8
    for one, other in product(computed, copies):
        assert one.end_s <= other.start_s + 1e-9 or other.end_s <= one.start_s + 1e-9

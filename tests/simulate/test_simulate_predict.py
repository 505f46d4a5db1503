"""The prediction of a step: its parts, degenerate cases, and agreement with the simulation of every event."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from frameworks import FSDP, MEGATRON_LM

from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.config.grid import AXES
from memo.errors import ConfigError, HostMemoryError, PlanError
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.state_memory import state_bytes
from memo.planner.problem import SwapProblem
from memo.simulate import predict_step
from memo.simulate.framework import Framework
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.model import step_model
from memo.simulate.swapping import choose, machine_limits, modelled_problem
from memo.simulate.trace import simulate_step
from memo.spec.clock import Op, program_of, run
from memo.spec.flops import step_flops
from memo.spec.schedule import forward_only

A800 = HARDWARE["a800-80"]


def config(model: str = "gpt-7b", **values: object) -> RunConfig:
    base = {"seq_length": 65536, "offload_alpha": "off", "device": "cuda", "mock_data": True}
    return RunConfig(model=preset(model)).override({**base, **values})


def checked(world_size: int, model: str = "gpt-7b", **values: object) -> RunConfig:
    run = config(model, **values)
    check(run, world_size)
    return run


def test_parts_sum_to_the_step_and_rates_agree() -> None:
    run = checked(32, tp=4, cp=2, pp=2, gbs=16, offload_alpha=0.5)
    step = predict_step(run, 32, A800)
    assert sum(step.seconds.values()) == pytest.approx(step.step_time_s)
    assert min(step.seconds.values()) >= 0.0
    assert step.tgs * 32 * step.step_time_s == pytest.approx(16 * 65536)
    assert step.tflops_per_gpu * 1e12 * 32 * step.step_time_s == pytest.approx(step_flops(run, 32))
    assert step.mfu_percent == pytest.approx(100 * step.tflops_per_gpu / 312)


@pytest.mark.parametrize("layout", [{"tp": 8}, {"tp": 2, "pp": 4}, {"tp": 2, "pp": 4, "vpp": 2}, {"dp": 8}])
def test_preferences_add_forwards_of_the_whole_batch(layout: dict[str, int]) -> None:
    """Two, or one with a file of the reference; as long as the clock takes for their schedule, within 2 %."""
    axes = {axis: size for axis, size in layout.items() if axis != "dp"}
    pairs = {"preference": "dpo", "lora_rank": 16, "mock_data": False, "data_path": ("pairs",)}
    plain = predict_step(checked(8, gbs=16, lora_rank=16, **axes), 8, A800)
    model = step_model(checked(8, gbs=16, **pairs, **axes), 8, A800)
    schedule = program_of(model.pipeline, [forward_only(model.pipeline)] * model.pipeline.stages)

    def execute(stage: int, op: Op, ready_s: float) -> float:
        action, last = op.executed_action, model.pipeline.last_virtual_stage
        losses_s = model.losses.total_s if model.pipeline.virtual_stage(stage, action.chunk) == last else 0.0
        return ready_s + model.action_s(stage, action) + losses_s

    clock_s = run(schedule, execute, model.message_s).makespan_s
    for forwards, more in ((2, {}), (1, {"reference_log_probs": "reference.json"})):
        step = predict_step(checked(8, gbs=16, **pairs, **axes, **more), 8, A800)
        assert step.step_time_s - plain.step_time_s == pytest.approx(forwards * clock_s, rel=0.02)
        assert sum(step.seconds.values()) == pytest.approx(step.step_time_s)


def test_recomputation_is_that_of_the_chosen_tiles() -> None:
    for alpha in (0.0, 0.5, 1.0):
        step = predict_step(checked(8, tp=4, cp=2, gbs=3, offload_alpha=alpha), 8, A800)
        assert step.swap is not None
        assert step.seconds["recompute"] == pytest.approx(step.swap.recompute_s * 32 * 3)
        assert (step.seconds["recompute"] > 0) == (alpha < 1)


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 1, "cp": 1, "pp": 1, "vpp": 1},
    {"tp": 4, "cp": 2, "pp": 1, "vpp": 1},
    {"tp": 2, "cp": 2, "pp": 2, "vpp": 1},
    {"tp": 2, "cp": 1, "pp": 4, "vpp": 2},
    {"tp": 1, "cp": 1, "pp": 8, "vpp": 1},
    {"tp": 2, "cp": 2, "pp": 2, "vpp": 1, "window_size": 1024, "layer_types": "sliding,sliding,full"},
]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("alpha", ["off", 0.0, 1.0])
def test_prediction_is_what_the_simulation_of_every_event_gives(layout: dict[str, Any], alpha: object) -> None:
    """Also where copies do not hide (alpha 1 at 32K). What of a step is waiting for copies and what for other stages
    is less certain than the step: warm-up and cool-down wait otherwise than the steady phase."""
    ranks = layout["tp"] * layout["cp"] * layout["pp"] * 2
    for microbatches, seq_length in itertools.product((layout["pp"], 24), (32768, 262144)):
        run = checked(ranks, **layout, seq_length=seq_length, offload_alpha=alpha, gbs=2 * microbatches)
        predicted, simulated = predict_step(run, ranks, A800), simulate_step(run, ranks, A800)
        assert predicted.step_time_s == pytest.approx(simulated.step_time_s, rel=0.005)
        assert predicted.seconds["copies"] == pytest.approx(
            sum(simulated.stall_s) / layout["pp"], rel=0.15, abs=0.005 * predicted.step_time_s
        )


def test_a_stack_of_two_kinds_takes_what_its_layers_take() -> None:
    """Llama 8B, of whose 32 layers 8 see all tokens: compute and FLOPs lie between those of stacks of one kind."""
    window = {"window_size": 4096, "tp": 8, "offload_alpha": 1.0, "seq_length": 262144}
    stacks = [{**window, "window_size": 0}, window, {**window, "layer_types": "full,sliding,sliding,sliding"}]
    full, sliding, both = (config("llama-3.1-8b", **flags) for flags in stacks)
    assert both.model.types_of_layers.count("full") == 8
    assert step_flops(both, 8) == (step_flops(full, 8) + 3 * step_flops(sliding, 8)) / 4
    steps = [predict_step(run, 8, HARDWARE["h100-80"]) for run in (full, sliding, both)]
    for part in ("attention", "matmul", "recompute"):
        expected = (steps[0].seconds[part] + 3 * steps[1].seconds[part]) / 4
        assert steps[2].seconds[part] == pytest.approx(expected), part


def test_a_link_without_end_hides_everything_and_none_hides_nothing() -> None:
    run = config(tp=4, cp=2, offload_alpha=1.0)
    endless = replace(A800, offload_gb_per_s=1e9, prefetch_gb_per_s=1e9)
    assert predict_step(run, 8, endless).hidden_share == pytest.approx(1.0)
    hardly = replace(A800, offload_gb_per_s=1e-3, prefetch_gb_per_s=1e-3)
    slow = predict_step(run, 8, hardly)
    assert slow.hidden_share < 0.01
    # Then copies are all that counts: 30 of 32 layers each way, one stream a direction, one after the other.
    assert slow.swap is not None
    assert slow.step_time_s == pytest.approx(2 * 30 * slow.swap.moved_bytes / 1e6, rel=0.05)


def test_one_layer_on_one_rank() -> None:
    run = checked(1, num_layers=1, seq_length=8192, offload_alpha=1.0)
    step = predict_step(run, 1, A800)
    assert (step.bubble_share, step.seconds["copies"], step.seconds["pipeline"]) == (0.0, 0.0, pytest.approx(0.0))
    assert step.step_time_s == pytest.approx(simulate_step(run, 1, A800).step_time_s)


@pytest.mark.parametrize("microbatches", range(1, 7))
def test_no_part_of_a_step_is_less_than_nothing(microbatches: int) -> None:
    """One stage waits for no other; what rounding leaves is not shown as a negative time."""
    assert min(predict_step(config(tp=8, gbs=microbatches), 8, A800).seconds.values()) >= 0.0


def test_twice_the_microbatches_take_twice_the_time_of_one_stage() -> None:
    one, two = (predict_step(config(tp=8, gbs=n, overlap_grad_reduce=False), 8, A800) for n in (8, 16))
    rest = one.seconds["data"] + one.seconds["optimizer"]
    assert two.step_time_s - rest == pytest.approx(2 * (one.step_time_s - rest))


def test_bubble_of_a_uniform_pipeline() -> None:
    """A model whose ends weigh next to nothing: the textbook's share, but for messages."""
    run = checked(4, pp=4, gbs=12, vocab_size=64, seq_length=131072)
    assert predict_step(run, 4, A800).bubble_share == pytest.approx(3 / (12 + 3), abs=0.005)


def test_reductions_hide_under_the_last_backward_only_if_asked() -> None:
    overlapped, not_overlapped = (
        predict_step(config(tp=4, gbs=8, seq_length=8192, overlap_grad_reduce=flag), 32, A800) for flag in (True, False)
    )
    assert overlapped.seconds["data"] < not_overlapped.seconds["data"]
    update = step_model(config(tp=4), 32, A800).updates[0]
    last_s = update.rest_s + update.replicas_s
    assert update.exposed_s(32, backward_s=1e9) == pytest.approx(update.bucket_s + last_s)
    assert update.exposed_s(32, backward_s=0.0) == pytest.approx(32 * update.bucket_s + last_s)
    late = update._replace(overlaps=False)
    assert late.exposed_s(32, backward_s=1e9) == pytest.approx(32 * update.bucket_s + last_s)


def problem_for(run: RunConfig, ranks: int, hardware: Hardware) -> SwapProblem:
    layer = swapped_layer(run, Kernels(hardware, "bf16"))
    return modelled_problem(run, ranks, hardware, layer, machine_limits(run, ranks, hardware))


def test_a_limit_of_host_memory_is_capped_by_the_node() -> None:
    """As in training, where eight ranks share --offload-host-memory-gib, or nine tenths of what is free."""
    most = A800.host_memory_bytes // 8
    for limit_gib, allowed in (
        (None, int(0.9 * A800.host_memory_bytes) // 8),
        (A800.host_memory_gib / 2, most // 2),
        (A800.host_memory_gib, most),
        (1000 * A800.host_memory_gib, most),
    ):
        run = checked(8, tp=8, offload_alpha="auto", offload_host_memory_gib=limit_gib)
        assert problem_for(run, 8, A800).host_bytes == allowed
        placed = replace(run, memory=replace(run.memory, offload_states="all"))
        states = state_bytes(placed, 8, 0).host
        assert 8 * (problem_for(placed, 8, A800).host_bytes + states) <= A800.host_memory_bytes


@pytest.mark.parametrize("policy", ["auto", "paper"])
def test_auto_recomputes_no_more_than_any_share_for_all(policy: str) -> None:
    """Of the machine's own problem, whose limits it keeps, but for a link that does not hide what always moves."""
    compared = 0
    for seq_length, gb_per_s in itertools.product((262144, 524288, 1048576), (5.0, 10.0, 20.0, 60.0)):
        machine = replace(A800, offload_gb_per_s=gb_per_s, prefetch_gb_per_s=gb_per_s)
        run = config(tp=8, seq_length=seq_length, offload_alpha="auto", offload_policy=policy)
        problem = problem_for(run, 8, machine)
        if problem.fits_resident:
            continue
        compared += 1
        best = choose(problem, "auto")
        assert problem.violated(best.tiles) in ([], problem.violated(problem.uniform(0)))
        for count in range(problem.tiles + 1):
            if not problem.violated(problem.uniform(count)):
                assert best.recompute_s <= choose(problem, count / problem.tiles).recompute_s + 1e-12
    assert compared >= 8


def test_auto_moves_nothing_where_all_fits() -> None:
    step = predict_step(config(tp=8, seq_length=8192, offload_alpha="auto"), 8, HARDWARE["h200"])
    off = predict_step(config(tp=8, seq_length=8192, offload_alpha="off"), 8, HARDWARE["h200"])
    assert step.swap is None
    assert step.step_time_s == off.step_time_s


def test_an_argument_overrides_the_configuration() -> None:
    run = config(tp=8, seq_length=524288, offload_alpha="auto")
    assert predict_step(run, 8, A800, alpha=0.25).step_time_s == pytest.approx(
        predict_step(config(tp=8, seq_length=524288, offload_alpha=0.25), 8, A800).step_time_s
    )


def test_auto_says_what_does_not_fit() -> None:
    run = config(tp=8, seq_length=1048576, offload_alpha="auto")
    with pytest.raises(HostMemoryError, match="host memory"):
        predict_step(run, 8, replace(A800, host_memory_gib=1))
    with pytest.raises(PlanError, match="device memory"):
        predict_step(run, 8, replace(A800, memory_gib=20))


def test_a_dtype_that_the_machine_cannot_do_is_refused() -> None:
    with pytest.raises(ConfigError, match="no peak for --dtype fp64"):
        predict_step(config(params_dtype="fp64"), 8, replace(A800, peak_tflops={"bf16": 312.0}))


def test_a_cpu_is_slow_and_its_copies_take_turns() -> None:
    run = config("llama-tiny", seq_length=4096, vocab_size=257, offload_alpha=0.5, device="cpu")
    step = predict_step(run, 1, HARDWARE["cpu"])
    assert step.hidden_share == pytest.approx(0.0, abs=1e-9)
    assert step.seconds["copies"] > 0.0
    assert step.step_time_s == pytest.approx(simulate_step(run, 1, HARDWARE["cpu"]).step_time_s)


def test_a_given_peak_replaces_the_table() -> None:
    run = config(tp=8, peak_tflops=624.0)
    step, plain = predict_step(run, 8, A800), predict_step(config(tp=8), 8, A800)
    assert step.seconds["matmul"] < 0.6 * plain.seconds["matmul"]
    assert step.mfu_percent == pytest.approx(100 * step.tflops_per_gpu / 624.0)


def test_a_framework_that_waits_for_its_messages_loses_their_time_in_each_microbatch() -> None:
    """Two stages on two nodes, over a network that takes 5 ms for a message: others send beside compute."""
    run = checked(16, tp=8, pp=2, gbs=16, seq_length=8192)
    message_bytes = 8192 / 8 * 4096 * 2
    slow = replace(A800, network_gb_per_s=message_bytes / 0.005 / A800.efficiency.network / 1e9)
    here, there = (predict_step(run, 16, slow, framework=way) for way in (FSDP, MEGATRON_LM))
    assert there.step_time_s - here.step_time_s == pytest.approx(2 * 15 * 0.005, rel=0.1)
    alone = checked(16, tp=8, gbs=16, seq_length=8192)
    megatron, fsdp = (predict_step(alone, 16, slow, framework=framework) for framework in (MEGATRON_LM, FSDP))
    assert replace(megatron, parts=fsdp.parts) == fsdp


def test_the_order_of_ranks_decides_which_messages_leave_a_node() -> None:
    """Copies of a model on four ranks: their stages are neighbours, or the reduction of gradients is."""
    run = checked(16, tp=2, pp=2, gbs=16, seq_length=8192)
    models = [step_model(run, 16, A800, framework=Framework(order)) for order in (AXES, ("tp", "cp", "pp", "dp"))]
    rates = [A800.network_gb_per_s * A800.efficiency.network, A800.node_gb_per_s * A800.efficiency.node]
    sent_bytes = 8192 / 2 * 4096 * 2
    for model, rate in zip(models, rates, strict=True):
        assert model.message_s == pytest.approx(sent_bytes / (rate * 1e9) + A800.efficiency.collective_s)
    # Of the four members of a reduction, all share a node in memo's order, and two in the other.
    assert models[1].updates[0].bucket_s > 2 * models[0].updates[0].bucket_s

"""The joint plan: what fits stays, what moves is what must, and nothing that is tried is faster."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.config.checks import check
from memo.errors import ResourceError
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.memory_account import own_memories, worst_device_bytes
from memo.estimate.node_memory import node_host_bytes
from memo.estimate.verdict import MemoryLimits
from memo.search.bounds import Bounds
from memo.search.candidates import AUTO, SHARDINGS, Layout, config_of
from memo.search.granularity import Machine, resolve_states
from memo.search.launch import command, run_of
from memo.search.placed import costs_of, placed, placed_strategies
from memo.search.question import ask
from memo.search.race import Race
from memo.search.ranking import search
from memo.search.state_costs import Costs
from memo.search.states import contenders, fits, place, starts
from memo.search.sweeping import sweeps
from memo.search.tables import Commands, text
from memo.simulate import predict_step
from memo.spec.placement import StatePlacement, placement_of, with_placement
from memo.units import GIB

MACHINE = HARDWARE["a800-80"]


def run(**values: Any) -> RunConfig:
    base = {"seq_length": 4096, "device": "cuda", "offload_states": "auto", "params_dtype": "bf16"}
    return RunConfig(model=preset("gpt-7b")).override(base | values)


def resolved(gib: float, host_gib: float = 512, world_size: int = 1, **values: Any) -> RunConfig:
    limits = MemoryLimits(gib * GIB, host_gib * GIB, world_size)
    return resolve_states(run(**values), Machine(world_size, MACHINE, limits))


@pytest.mark.parametrize("counts", [(0, 0, 0), (5, 0, 0), (32, 0, 0), (32, 32, 32), (32, 7, 3), (9, 9, 0), (9, 0, 9)])
@pytest.mark.parametrize("copy", [True, False])
def test_a_run_says_the_placement(counts: tuple[int, int, int], copy: bool) -> None:
    placement = StatePlacement(32, *counts, weight_copy=copy or not any(counts[1:]))
    config = with_placement(run(), placement)
    assert placement_of(config, 1) == placement
    check(config, 1, needs_data=False)
    assert config.memory.offload_weight_copy == placement.weight_copy
    assert (config.memory.offload_states != "none") == any(counts)


def test_where_everything_fits_nothing_moves() -> None:
    assert resolved(200).memory.offload_states == "none"
    given = run(offload_states="optimizer")
    assert resolve_states(given, Machine(1, MACHINE, MemoryLimits(1.0, 1.0, 1))) is given


@pytest.mark.parametrize("gib", [100, 60, 30])
@pytest.mark.parametrize("values", [{}, {"gbs": 4}, {"offload_alpha": "off"}, {"recompute_granularity": "full"}])
def test_the_less_the_device_holds_the_more_moves(gib: float, values: dict[str, Any]) -> None:
    """It fits by the estimate that admits a run, and moving less would not."""
    config = resolved(gib, **values)
    assert worst_device_bytes(config, 1) <= gib * GIB
    assert node_host_bytes(config, 1, 1, None) <= 512 * GIB
    at = placement_of(config, 1)
    less = [at._replace(optimizer=0, gradients=0, weights=0)]
    less += [at._replace(weights=at.weights - 1, gradients=min(at.gradients, at.weights - 1))] if at.weights else []
    assert all(worst_device_bytes(with_placement(config, other), 1) > gib * GIB for other in less[:1])


def test_more_device_memory_never_makes_a_step_slower() -> None:
    limits = [MemoryLimits(gib * GIB, 512 * GIB, 1) for gib in (16, 24, 40, 80, 120)]
    times = [place(Costs(run(), 1, MACHINE, each)) for each in limits]
    steps = [found.step.step_time_s for found in times if found is not None]
    assert len(steps) == 5
    assert all(after <= before * 1.02 for before, after in pairwise(steps))


@pytest.mark.parametrize(("world_size", "values"), [(1, {}), (8, {}), (1, {"gbs": 4}), (8, {"gbs": 32})])
def test_no_coarse_placement_is_much_faster(world_size: int, values: dict[str, Any]) -> None:
    """By simulation of all that fit on a grid of quarters, with the same ways of activations: at most 3.5 %."""
    costs = Costs(run(**values), world_size, MACHINE, MemoryLimits(30 * GIB, 900 * GIB, world_size))
    found = place(costs)
    assert found is not None
    best = float("inf")
    quarters = (0, 8, 16, 24, 32)
    for optimizer, gradients, weights, copy in product(quarters, quarters, quarters, (True, False)):
        if max(gradients, weights) > optimizer or (not copy and not weights):
            continue
        at = StatePlacement(32, optimizer, gradients, weights, weight_copy=copy)
        use = costs.best_use(at)[1]
        if use is not None:
            step = predict_step(with_placement(use.config, at), world_size, MACHINE, use.moved)
            best = min(best, step.step_time_s)
    assert found.step.step_time_s <= 1.035 * best


def test_what_binds_is_named() -> None:
    with pytest.raises(ResourceError, match=r"host memory binds: with the states of .* which has 20\.00 GiB"):
        resolved(16, host_gib=20)
    with pytest.raises(ResourceError, match=r"device memory binds: .*--device-memory-gib"):
        resolved(2)


def test_both_sides_are_filled_where_neither_suffices() -> None:
    """7B: 32 layers of 0.2B, 16 bytes each in host memory, 18 on the device."""
    config = resolved(80, host_gib=60)
    at = placement_of(config, 1)
    assert 8 <= at.optimizer <= 18 and not at.ends_on_host
    assert node_host_bytes(config, 1, 1, None) <= 60 * GIB


def test_on_a_cpu_the_device_is_counted_to_the_byte() -> None:
    values = {"device": "cpu", "params_dtype": "fp32", "seq_length": 64, "offload_alpha": "off", "num_layers": 6}
    values |= {"hidden_size": 256, "num_attention_heads": 4, "vocab_size": 257, "offload_states": "auto"}
    config = RunConfig().override(values)
    none = worst_device_bytes(with_placement(config, StatePlacement(6)), 1)
    every = worst_device_bytes(with_placement(config, StatePlacement(6, 6, 6, 6)), 1)
    for cap in (every, (every + none) // 2, none - 1, none):
        found = resolve_states(config, Machine(1, HARDWARE["cpu"], MemoryLimits(cap, 8 * GIB, 1)))
        assert worst_device_bytes(found, 1) <= cap
        assert (found.memory.offload_states == "none") == (cap == none)
    with pytest.raises(ResourceError, match="device memory binds"):
        resolve_states(config, Machine(1, HARDWARE["cpu"], MemoryLimits(every // 2, 8 * GIB, 1)))


@pytest.mark.parametrize(
    ("gpus", "tried"),
    [
        (1, [Layout(1), Layout(1, mbs=2)]),
        (8, [Layout(2, 2)]),
        pytest.param(8, [Layout(1, 1, 2), Layout(1), Layout(2), Layout(1, mbs=2)], marks=pytest.mark.full),
    ],
)
def test_bounds_of_placed_layouts_lie_below_their_simulation(gpus: int, tried: list[Layout]) -> None:
    question = ask("llama-3.1-8b", gpus, seq_len=8192, global_batch_size=16, gpu_memory_gib=30)
    bounds, seen = Bounds(question), 0
    for layout in tried:
        for strategy in placed_strategies(question, layout):
            found = placed(question, layout, strategy)
            if found is not None:
                seen += 1
                assert bounds.least_placed_s(layout, strategy) <= found.step.step_time_s
    assert seen >= 2


def test_bounds_of_uses_of_activations_lie_below_their_simulation() -> None:
    """With windows in most layers copies are waited for, so the bounds with waits are higher, and they still hold."""
    question = ask("gemma-3-12b", 8, seq_len=131072, global_batch_size=16, gpu_memory_gib=40)
    race, shares = Race(question), []
    for layout, strategy in product([Layout(1, 4), Layout(2, 2), Layout(1, 2, 2)], SHARDINGS):
        costs = race.costs_that_fit(layout, AUTO._replace(sharding=strategy))
        assert costs is not None
        for each in contenders(costs):
            found = place(costs, among=[each])
            if found is None:
                continue
            shares.append(costs.least_s(each.use, with_waits=True) / costs.least_s(each.use))
            assert each.least_s <= found.step.step_time_s
    assert len(shares) > 20 and min(shares) >= 1 - 1e-9 and max(shares) > 1.1


def test_swept_layers_move_more_where_that_is_faster_although_all_states_stay_on_the_device() -> None:
    question, layout = ask("llama-3.1-8b", 8, seq_len=1 << 20, global_batch_size=8), Layout(2, 4, cp_comm_type="a2a")
    strategy = next(sweeps(question, layout))._replace(sharding="optim_grads_params")
    costs = costs_of(question, layout, strategy)
    found = place(costs)
    assert costs.holds(costs.none, costs.uses[0]) and found is not None
    assert found.step.step_time_s < costs.uses[0].step.step_time_s


def test_a_placement_is_found_although_no_start_of_the_search_fits() -> None:
    """More layers of optimizer and weights must go to host memory than need to, and fewer gradients."""
    question = ask("gemma-3-27b", 8, seq_len=262144, global_batch_size=16)
    costs = Race(question).costs_that_fit(Layout(1, 4, cp_comm_type="a2a"), AUTO)
    assert costs is not None
    best = place(costs)
    assert best is not None
    least = contenders(costs, 1.01 * best.step.step_time_s)
    costs = costs.within(costs.limits, [each.use for each in least])
    assert all(costs.best_use(start)[1] is None for start in starts(costs))
    assert place(costs, among=least) is not None


@pytest.mark.parametrize("model", ["llama-3.1-8b", "qwen3.5-9b"])
def test_the_bound_of_a_layout_lies_below_those_of_its_strategies(model: str) -> None:
    """Delta nets take less time where they are swept, and under tp layers on tiles hide messages."""
    question = ask(model, 8, seq_len=131072)
    race = Race(question)
    for layout in [Layout(), Layout(2), Layout(4, 2), Layout(cp=4, cp_comm_type="a2a"), Layout(1, 1, 4), Layout(mbs=2)]:
        of_strategies = [race.bounds.least_placed_s(layout, way) for way in placed_strategies(question, layout)]
        assert race.least_placed_s(layout) <= min(of_strategies)


def test_memory_of_a_choice_is_that_of_its_placement() -> None:
    """And a run may have it."""
    question = ask("llama-3.1-8b", 8, seq_len=8192, gpu_memory_gib=24)
    for strategy in placed_strategies(question, Layout(2)):
        costs = costs_of(question, Layout(2), strategy)
        assert fits(costs)
        found = placed(question, Layout(2), strategy)
        assert found is not None and found.strategy.placement is not None and found.strategy.sharding in SHARDINGS
        config = config_of(question, Layout(2), found.strategy)
        check(replace(config, model=question.model.run), 8, needs_data=False)
        use = costs.best_use(found.strategy.placement)[1]
        assert use is not None
        device, host = costs.needed(found.strategy.placement, use)
        exact = question.account.worst(config, found.moved).total
        assert exact <= device <= 1.04 * exact
        assert host == node_host_bytes(config, 8, 8, found.moved)


def test_memory_of_a_choice_is_that_of_the_worst_stage() -> None:
    """With few layers a stage that is the second one, which also receives and sends."""
    question, layout = ask("llama-3.1-8b", 8, seq_len=131072, gpu_memory_gib=36), Layout(pp=8)
    strategy = next(iter(placed_strategies(question, layout)))
    found = placed(question, layout, strategy)
    assert found is not None and found.strategy.placement is not None
    costs, config = costs_of(question, layout, strategy), config_of(question, layout, found.strategy)
    use = costs.best_use(found.strategy.placement)[1]
    assert use is not None
    links = question.account.links
    memories = own_memories(config, question.gpus, range(8), moved=found.moved, links=links)
    stages = [memories[stage].total for stage in range(8)]
    assert max(stages[0], stages[-1]) < stages[1] == max(stages)
    assert max(stages) <= costs.needed(found.strategy.placement, use)[0] <= 1.035 * max(stages)


def test_states_are_placed_where_nothing_fits_without() -> None:
    question = ask("llama-3.1-8b", 1, seq_len=4096, gpu_memory_gib=24)
    best = search(question).best
    assert best is not None and best.strategy.placement is not None and best.strategy.placement.optimizer == 32
    assert best.sized.host_bytes > 100 * GIB and best.sized.verdict == "fits"
    assert search(replace(question, place_states="never")).best is None
    small = search(replace(question, host_memory_gib=64.0))
    assert small.best is None and "host memory binds" in small.refusals[0].text


def test_states_are_placed_where_that_is_clearly_faster() -> None:
    """With whole states, qwen3-30b-a3b needs a pipeline of 4 stages on these GPUs."""
    for model, is_faster in {"qwen3-30b-a3b": True, "llama-3.1-8b": False}.items():
        question = ask(model, 8, seq_len=65536, hardware="h100-80", host_memory_gib=2048)
        auto, never = (search(replace(question, place_states=when)) for when in ("auto", "never"))
        assert auto.best is not None and never.best is not None and never.best.strategy.placement is None
        if is_faster:
            assert auto.best.strategy.placement is not None
            assert auto.best.step.step_time_s < 0.8 * never.best.step.step_time_s
        else:
            assert auto.choices == never.choices


def test_states_are_placed_where_sweeps_alone_have_room_beside_them() -> None:
    """Experts in small tiles take much longer than the copies of frozen weights to whole layers."""
    lora: dict[str, Any] = {"seq_len": 131072, "hardware": "h100-80", "host_memory_gib": 512, "lora_rank": 16}
    plan = search(ask("glm-4.7-flash", 1, **lora))
    swept = search(replace(plan.question, place_states="never")).best
    assert swept is not None and swept.strategy.sweep.tiles and not swept.sized.is_tight
    assert plan.best is not None and plan.best.strategy.placement is not None and not plan.best.strategy.sweep.tiles
    assert plan.best.step.step_time_s < 0.8 * swept.step.step_time_s


def test_experts_are_also_swept_in_as_few_tiles_as_fill_two_slots() -> None:
    for model, counts in {"qwen3-30b-a3b": [8, 16, 32, 128], "llama-3.1-8b": [16, 32, 128]}.items():
        question = ask(model, 8, seq_len=524288, hardware="h100-80", host_memory_gib=2048)
        assert [strategy.sweep.tiles for strategy in sweeps(question, Layout(tp=4))][: len(counts)] == counts


def test_breadth_first_is_chosen_where_it_saves_copies() -> None:
    """Seven microbatches of one sequence: depth first copies weights and gradients that stream seven times."""
    question = ask("llama-3.1-8b", 1, seq_len=2048, global_batch_size=7, hardware="a100-40", host_memory_gib=512)
    best = search(question).best
    assert best is not None and best.strategy.order == "breadth_first" and best.sized.verdict == "fits"
    depth_first = [way for way in placed_strategies(question, best.layout) if way.order == "depth_first"]
    found = [placed(question, best.layout, way) for way in depth_first]
    assert len(found) == 2
    assert all(other is not None and other.step.step_time_s > 2 * best.step.step_time_s for other in found)
    run = run_of(question, best)
    assert run.parallel.gradient_accumulation_order == "breadth_first"
    check(run, 1, needs_data=False)
    assert " --gradient-accumulation-order breadth_first " in command(question, best)
    assert "breadth first" in str(best.strategy)
    assert "--gradient-accumulation-order breadth_first: all microbatches" in text(search(question), Commands())


@pytest.mark.parametrize("layout", [Layout(pp=2), Layout(mbs=16)])
def test_breadth_first_is_for_several_microbatches_on_one_stage(layout: Layout) -> None:
    question = ask("llama-3.1-8b", 2, seq_len=2048, global_batch_size=32)
    orders = {strategy.order for strategy in placed_strategies(question, layout)}
    assert orders == {"depth_first"}
    assert {strategy.order for strategy in placed_strategies(question, Layout())} == {"depth_first", "breadth_first"}


def test_breadth_first_that_saves_nothing_is_not_chosen() -> None:
    """Compute takes nearly all of the step in either order, and breadth first would take more host memory."""
    best = search(ask("llama-3.1-8b", 1, seq_len=8192, global_batch_size=8)).best
    assert best is not None and best.strategy.placement is not None and best.strategy.order == "depth_first"

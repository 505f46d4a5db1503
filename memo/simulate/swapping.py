"""The share of activations that a simulated run moves, and the times of its layers and copies with this share."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from memo.config import RunConfig
from memo.config.derived import resolved_sections
from memo.estimate.hardware import Hardware
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.memory_account import PROCESS_BYTES
from memo.estimate.state_memory import state_bytes
from memo.estimate.swap_memory import beside_slots
from memo.estimate.unseen_memory import links_of, unseen_memory
from memo.estimate.verdict import sure_bytes
from memo.planner.alpha import bundles_of, solve
from memo.planner.problem import Limit, Link, SwapProblem
from memo.planner.solution import SwapSolution, predict
from memo.planner.swap import SwapPlan, swap_plan
from memo.planner.swap_problem import NO_LIMITS, ActivationLimits, activation_limits, swap_problem
from memo.simulate.cost import LayerCost
from memo.simulate.streams import LayerTimes
from memo.spec.disk import Disk
from memo.spec.layer_ops import stage_ops, swept_ops
from memo.spec.schedule import Pipeline, pipeline_of
from memo.spec.slots import whole_tiles
from memo.spec.stack import layers_with_attention_again
from memo.spec.steady import of_all_microbatches, shortened, steady_microbatches
from memo.units import GIB


class Sweeping(NamedTuple):
    """How layers are swept: the number of sections, and the layers that recompute attention (`again`)."""

    sections: int = 1
    again: frozenset[int] = frozenset()


WHOLE_LAYERS = Sweeping()


@lru_cache(maxsize=256)
def stage_plan(pipeline: Pipeline, stage: int, num_layers: int, sweep: Sweeping = WHOLE_LAYERS) -> SwapPlan:
    """Return the swap plan of one stage over all microbatches of `pipeline`; a slot holds a layer, or a section.

    Cached, because a search asks again and again for the plans of the same few shortened pipelines.
    """
    ops = stage_ops(pipeline, stage, num_layers)
    if sweep == WHOLE_LAYERS:
        return swap_plan(ops)
    return swap_plan(swept_ops(ops, sweep.sections, sweep.again)[0])


def moves_and_records(
    pipeline: Pipeline, stage: int, num_layers: int, sweep: Sweeping = WHOLE_LAYERS
) -> tuple[int, ...]:
    """Return the number of offloads and of host records in a stage's plan over all microbatches.

    Both grow linearly from two sections on, so the plans of 2 and 3 sections give the numbers for more sections.
    """
    if sweep.sections > 3:
        two, three = (
            moves_and_records(pipeline, stage, num_layers, sweep._replace(sections=count)) for count in (2, 3)
        )
        return tuple(number + (sweep.sections - 2) * (more - number) for number, more in zip(two, three, strict=True))

    def count(short: Pipeline) -> tuple[int, int]:
        plan = stage_plan(short, stage, num_layers, sweep)
        return plan.num_offloads, plan.num_records

    return of_all_microbatches(pipeline, steady_microbatches(pipeline), count)


def machine_limits(config: RunConfig, world_size: int, hardware: Hardware) -> ActivationLimits:
    """Return the limits of a run on the first stage if all of the machine's memory is free."""
    on_device = _on_device(config, hardware)
    states = state_bytes(on_device, world_size, 0)
    device_bytes, runtime_bytes = int(GIB * hardware.visible_gib), PROCESS_BYTES
    if hardware.device == "cuda":
        device_bytes = int(sure_bytes(device_bytes))
        runtime_bytes = unseen_memory(on_device, world_size, links_of(hardware), states.host).foreseen
    free_bytes = device_bytes - states.device - runtime_bytes
    free_host_bytes = host_bytes_of_rank(config, world_size, hardware) - states.host
    disk = disk_of_rank(config, world_size, hardware)
    return activation_limits(on_device, world_size, 0, free_bytes, free_host_bytes, disk)


def _on_device(config: RunConfig, hardware: Hardware) -> RunConfig:
    """Return the run on the device of `hardware`, which decides the dtype if the run names none."""
    return replace(config, hardware=replace(config.hardware, device=hardware.device))


def disk_of_rank(config: RunConfig, world_size: int, hardware: Hardware) -> Disk | None:
    """Return the disk of a rank; None if the run names no disk, or the machine has none."""
    return None if config.memory.offload_nvme_path is None else hardware.nvme_of_rank(world_size)


def on_disk(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    problem: SwapProblem,
    solution: SwapSolution,
    times: LayerTimes,
) -> LayerTimes:
    """Return `times`, with the times of the disk if some records of the first stage do not fit in host memory.

    The first stage has most records."""
    disk = disk_of_rank(config, world_size, hardware)
    if disk is None:
        return times
    states = state_bytes(_on_device(config, hardware), world_size, 0)
    host_bytes = max(0, host_bytes_of_rank(config, world_size, hardware) - states.host)
    split = replace(problem, host_bytes=host_bytes, disk=disk).split(problem.moved_bytes(solution.tiles))
    if split is not None and not any(split.on_disk):
        return times
    # Each section of a layer has one record of inputs and one of a slot.
    _, *away = (0, problem.inputs.number, problem.num_records) if split is None else split.on_disk
    in_memory = problem.inputs.number + problem.num_records - sum(away)
    moved_bytes = problem.sections * solution.moved_bytes
    return times._replace(
        write_s=moved_bytes / disk.write_bytes_per_s,
        read_s=moved_bytes / disk.read_bytes_per_s,
        layers_in_memory=in_memory // problem.sections,
    )


def modelled_problem(
    config: RunConfig,
    world_size: int,
    hardware: Hardware,
    layer: LayerCost,
    limits: ActivationLimits = NO_LIMITS,
) -> SwapProblem:
    """Return the problem that `memo.train.swap` would profile and plan on the first stage, from modelled times.

    The first stage holds most activations.

    Args:
        layer: the result of `memo.simulate.layer.swapped_layer`.
    """
    pipeline, num_layers = pipeline_of(config, world_size), config.model.num_layers
    sweep = Sweeping(resolved_sections(config), layers_with_attention_again(config))
    num_moves, num_records = moves_and_records(pipeline, 0, num_layers, sweep)
    forward_s, backward_s = min(layer.by_layer, default=layer.computed_s)
    two = sweep._replace(sections=min(sweep.sections, 2))
    return swap_problem(
        _on_device(config, hardware),
        world_size,
        num_slots=stage_plan(shortened(pipeline), 0, num_layers, two).num_slots,
        num_moves=num_moves,
        num_records=num_records,
        forward_s=forward_s,
        backward_s=backward_s,
        longer_s=sum(layer.computed_s) - forward_s - backward_s,
        recompute_s={name: cost.total_s for name, cost in layer.recompute.items()},
        offload=_link(hardware.offload_gb_per_s, hardware),
        prefetch=_link(hardware.prefetch_gb_per_s, hardware),
        limits=limits,
        beside=beside_slots(config, world_size, 0),
    )


def host_bytes_of_rank(config: RunConfig, world_size: int, hardware: Hardware) -> int:
    """Return a rank's share of the host memory that a node gives to a run if all of its memory is free."""
    node_bytes = node_budget_bytes(hardware.host_memory_bytes, config.memory.offload_host_memory_gib)
    return node_bytes // hardware.local_ranks(world_size)


def choose(problem: SwapProblem, alpha: float | str | Mapping[str, int]) -> SwapSolution:
    """Return the activations that move.

    `alpha` is a share of every group, rounded down to tiles; or tiles by group; or "auto", which answers and raises as
    `memo.planner.alpha.solve` does. Shares and tiles are not checked against limits: an estimate of memory says whether
    they fit.
    """
    if isinstance(alpha, Mapping):
        shares = {name: count / problem.tiles for name, count in alpha.items()}
        return predict(problem, dict(alpha), shares, Limit.REQUEST)
    if isinstance(alpha, str):
        return solve(problem)
    tiles = problem.uniform(whole_tiles(alpha, problem.tiles))
    return predict(problem, tiles, {group.name: float(alpha) for group in problem.groups}, Limit.REQUEST)


def ways_to_move(problem: SwapProblem) -> list[dict[str, int]]:
    """Return all choices of tiles in order, from the least to everything, without regard to limits.

    The first choice moves only the activations that always move. Each further choice adds a tile; the groups with the
    highest worth come first."""
    ways = [problem.uniform(0)]
    for groups in bundles_of(problem):
        for count in range(1, problem.tiles + 1):
            ways.append({**ways[-1], **{group.name: count for group in groups}})
    return ways


def layer_times(problem: SwapProblem, solution: SwapSolution, hardware: Hardware) -> LayerTimes:
    """Return the compute of the fastest layer with its recomputation, and its copies.

    Swept layers count all sections together, although copies of a section begin earlier than those of a layer.

    Known error: copies of hidden states in host memory by embedding and loss are not counted. With n layers they are at
    most 2 / n of the copies of hidden states by layers. Hidden states between stages count as messages.
    """
    hidden_bytes = problem.hidden.num_bytes if solution.moved_bytes else 0
    moved_bytes = problem.sections * (solution.moved_bytes + hidden_bytes)
    return LayerTimes(
        problem.sections * problem.forward_s,
        problem.sections * (problem.backward_s + solution.recompute_s),
        moved_bytes / (hardware.offload_gb_per_s * 1e9),
        moved_bytes / (hardware.prefetch_gb_per_s * 1e9),
        hardware.copies_overlap,
    )


def copies_s(pipeline: Pipeline, stage: int, num_layers: int, times: LayerTimes) -> float:
    """Return the seconds of all copies of activations on a stage, in both directions."""
    num_moves, _ = moves_and_records(pipeline, stage, num_layers)
    return num_moves * (times.offload_s + times.prefetch_s)


def always_hidden(times: LayerTimes, pipeline: Pipeline) -> bool:
    """Return whether no copy can ever hold compute up.

    A single stage offloads in forward and prefetches in backward: each copy overlaps with one layer operation. With
    several stages forward and backward alternate, and a slot is emptied and filled again during one operation.
    """
    offload_s, prefetch_s = times.slowest_offload_s, times.slowest_prefetch_s
    forward_s, backward_s = times.least_s
    if not times.copies_overlap:
        return offload_s + prefetch_s == 0.0
    if pipeline.stages == 1:
        return offload_s <= forward_s and prefetch_s <= backward_s
    return offload_s + prefetch_s <= min(forward_s, backward_s)


def _link(gb_per_s: float, hardware: Hardware) -> Link:
    rate = gb_per_s * 1e9
    return Link(rate, rate if hardware.copies_overlap else 0.0)

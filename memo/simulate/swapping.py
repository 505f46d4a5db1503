"""Which share of the activations a simulated run moves, and what its layers and copies take then."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from memo.config import RunConfig
from memo.errors import PlanError
from memo.estimate.hardware import Hardware
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.own_memory import RUNTIME_BYTES, activation_bytes
from memo.estimate.state_memory import state_bytes
from memo.planner.alpha import solve_at
from memo.planner.problem import Limit, Link, SwapGroup, SwapProblem, SwapSolution, predict, stay
from memo.planner.slot_costs import fixed_buffer_bytes, swap_groups
from memo.planner.swap import SwapPlan, swap_plan
from memo.simulate.layer import LayerCost
from memo.simulate.pipeline import repeats_after, steady_microbatches
from memo.simulate.streams import LayerTimes
from memo.spec.layer_ops import stage_ops
from memo.spec.schedule import Pipeline, pipeline_of
from memo.spec.skeleton import layer_bytes
from memo.spec.slots import slot_dims, whole_tiles


def stage_plan(pipeline: Pipeline, stage: int, num_layers: int) -> SwapPlan:
    """The swap plan of one stage over all microbatches of `pipeline`."""
    return swap_plan(stage_ops(pipeline, stage, num_layers))


@lru_cache(maxsize=256)
def steady_plan(short: Pipeline, stage: int, num_layers: int) -> SwapPlan:
    """The same for a shortened pipeline; a search asks for the same few again and again."""
    return stage_plan(short, stage, num_layers)


def shortened(pipeline: Pipeline) -> Pipeline:
    """The same pipeline with only as many microbatches as the steady phase takes to show."""
    return replace(pipeline, microbatches=steady_microbatches(pipeline))


def _of_all(pipeline: Pipeline, stage: int, num_layers: int, count: Callable[[SwapPlan], int]) -> int:
    """A count of a stage's plan over all microbatches, from those that the steady phase takes to show."""
    short, period = shortened(pipeline), repeats_after(pipeline)
    found = count(steady_plan(short, stage, num_layers))
    missing = pipeline.microbatches - short.microbatches
    if not missing:
        return found
    fewer = replace(short, microbatches=short.microbatches - period)
    return found + missing * (found - count(steady_plan(fewer, stage, num_layers))) // period


class Limits(NamedTuple):
    """Bytes that activations of one rank may take, as of `SwapProblem`."""

    device_bytes: int = sys.maxsize
    host_bytes: int = sys.maxsize
    resident_bytes: int | None = None


def machine_limits(config: RunConfig, world_size: int, hardware: Hardware) -> Limits:
    """What a run finds on the first stage when all of the machine's memory is free."""
    on_device = replace(config, hardware=replace(config.hardware, device=hardware.device))
    states, activations = state_bytes(on_device, world_size, 0), activation_bytes(on_device, world_size, 0)
    beside_bytes = states.device + activations.beside + RUNTIME_BYTES["cuda" if hardware.device == "cuda" else "cpu"]
    return Limits(
        max(0, hardware.memory_bytes - beside_bytes),
        max(0, host_bytes_of_rank(config, world_size, hardware) - states.host),
        activations.resident,
    )


def swap_problem(
    config: RunConfig, world_size: int, hardware: Hardware, layer: LayerCost, limits: Limits | None = None
) -> SwapProblem:
    """What `memo.train.swap` would profile and plan on the first stage, which holds most, from modelled times.

    Args:
        layer: of `memo.simulate.layer.swapped_layer`.
        limits: of memory; default: none.
    """
    parallel, memory = config.parallel, config.memory
    pipeline = pipeline_of(config, world_size)
    plan = steady_plan(shortened(pipeline), 0, config.model.num_layers)
    on_device = replace(config, hardware=replace(config.hardware, device=hardware.device))
    dims = slot_dims(on_device)
    sizes = layer_bytes(config.model, dims.tokens * dims.batch, dims.tp, dims.dtype, memory.offload_policy)
    recompute_s = {name: cost.total_s for name, cost in layer.recompute.items()}
    limits = limits or Limits()
    passes = config.model.num_layers // parallel.pp * pipeline.microbatches
    return SwapProblem(
        policy=memory.offload_policy,
        tiles=dims.tiles,
        always=sizes.always,
        groups=swap_groups(config.model, dims, plan.num_slots, sizes, recompute_s),
        never=sizes.never,
        forward_s=layer.forward.total_s,
        backward_s=layer.backward.total_s,
        offload=_link(hardware.offload_gb_per_s, hardware),
        prefetch=_link(hardware.prefetch_gb_per_s, hardware),
        num_passes=passes,
        num_moves=_of_all(pipeline, 0, config.model.num_layers, lambda plan: plan.num_offloads),
        num_records=_of_all(pipeline, 0, config.model.num_layers, lambda plan: plan.num_records),
        host_bytes=limits.host_bytes,
        device_bytes=limits.device_bytes,
        fixed_buffer_bytes=fixed_buffer_bytes(config.model, dims, plan.num_slots),
        resident_bytes=limits.resident_bytes,
    )


def host_bytes_of_rank(config: RunConfig, world_size: int, hardware: Hardware) -> int:
    """Of what the node gives a run when all of its memory is free, divided by its ranks."""
    node_bytes = node_budget_bytes(hardware.host_memory_bytes, config.memory.offload_host_memory_gb)
    return node_bytes // min(world_size, hardware.gpus_per_node)


def choose(problem: SwapProblem, alpha: float | str | Mapping[str, int]) -> SwapSolution:
    """What moves: a share of every group, rounded down to tiles, tiles by group, or for "auto" what limits allow.

    What is given is taken at its word: whether it fits is for an estimate of memory to say. "auto" answers as
    `memo.planner.alpha.solve`, but without a linear program: tiles are given one by one to the group that saves the
    most recomputation a byte and still fits. With several limits at once that may move a few tiles less.

    Raises:
        PlanError: a share outside [0, 1]; for "auto" also rounding buffers that do not fit on the device.
        HostMemoryError: for "auto", what always moves does not fit in host memory.
    """
    if isinstance(alpha, Mapping):
        shares = {name: count / problem.tiles for name, count in alpha.items()}
        return predict(problem, dict(alpha), shares, Limit.REQUEST)
    if not isinstance(alpha, str):
        if not 0 <= alpha <= 1:
            raise PlanError(f"alpha is {alpha}, but it is a share of the tokens: give 0 to 1")
        tiles = problem.uniform(whole_tiles(alpha, problem.tiles))
        return predict(problem, tiles, {group.name: float(alpha) for group in problem.groups}, Limit.REQUEST)
    if problem.fits_resident:
        return stay(problem)
    tiles = dict(solve_at(problem, 0.0).tiles)
    limit = Limit.EVERYTHING if problem.num_moves else Limit.NO_MOVES
    for groups in _bundles(problem):
        while tiles[groups[0].name] < problem.tiles:
            more = {**tiles, **{group.name: tiles[group.name] + 1 for group in groups}}
            broken = problem.violated(more)
            if broken:
                limit = broken[0]
                break
            tiles = more
    return predict(problem, tiles, {name: count / problem.tiles for name, count in tiles.items()}, limit)


def ways_to_move(problem: SwapProblem) -> list[dict[str, int]]:
    """From nothing but what always moves to everything, tile by tile as `choose` goes, whatever the limits."""
    ways = [problem.uniform(0)]
    for groups in _bundles(problem):
        for count in range(1, problem.tiles + 1):
            ways.append({**ways[-1], **{group.name: count for group in groups}})
    return ways


def _bundles(problem: SwapProblem) -> list[list[SwapGroup]]:
    """Groups that get their tiles together: first those that save the most recomputation a byte."""
    bundles = [list(problem.groups)] if problem.policy == "paper" else [[g] for g in problem.groups if g.recompute_s]
    bundles.sort(key=lambda groups: groups[0].recompute_s / max(1, groups[0].num_bytes), reverse=True)
    return bundles


def layer_times(problem: SwapProblem, solution: SwapSolution, hardware: Hardware) -> LayerTimes:
    """Compute of one layer with its recomputation, and its copies."""
    return LayerTimes(
        problem.forward_s,
        problem.backward_s + solution.recompute_s,
        solution.moved_bytes / (hardware.offload_gb_per_s * 1e9),
        solution.moved_bytes / (hardware.prefetch_gb_per_s * 1e9),
        hardware.copies_overlap,
    )


def copies_s(pipeline: Pipeline, stage: int, num_layers: int, times: LayerTimes) -> float:
    """Seconds that the copies of activations take on a stage, both directions."""
    num_moves = _of_all(pipeline, stage, num_layers, lambda plan: plan.num_offloads)
    return num_moves * (times.offload_s + times.prefetch_s)


def always_hidden(times: LayerTimes, pipeline: Pipeline) -> bool:
    """Whether no copy can ever hold compute up.

    One stage offloads in forward and prefetches in backward: each copy has one layer operation to hide under. With
    several stages forward and backward alternate, and a slot is emptied and filled again under one operation.
    """
    if not times.copies_overlap:
        return times.offload_s + times.prefetch_s == 0.0
    if pipeline.stages == 1:
        return times.offload_s <= times.forward_s and times.prefetch_s <= times.backward_s
    return times.offload_s + times.prefetch_s <= min(times.forward_s, times.backward_s)


def _link(gb_per_s: float, hardware: Hardware) -> Link:
    rate = gb_per_s * 1e9
    return Link(rate, rate if hardware.copies_overlap else 0.0)

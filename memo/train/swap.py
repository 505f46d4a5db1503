"""Token-wise swapping for a model that is already built: profile, plan, slots, wrapped layers."""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import torch

from memo.artifacts.layer_profile import LayerProfile
from memo.config import RunConfig
from memo.config.derived import local_world_size_from_env, resolved_sections
from memo.estimate.host_memory import available_host_bytes
from memo.executor.disk_rate import measured_disk
from memo.executor.host_budget import HostBudget
from memo.executor.runtime import SwapRuntime, SweepRuntime
from memo.executor.streams import StreamBackend
from memo.mesh import Mesh
from memo.model.layer import TransformerLayer
from memo.model.transformer import TransformerChunk
from memo.parallel.collectives import all_reduce
from memo.parallel.data import ShardedDataParallel
from memo.planner.alpha import no_staging, solve, solve_at
from memo.planner.alpha_table import describe
from memo.planner.disk_plan import DiskPlan, disk_plan
from memo.planner.problem import Limit, Link, SwapProblem, SwapSolution, predict
from memo.planner.swap import SwapPlan, swap_plan
from memo.planner.swap_problem import activation_limits, swap_problem
from memo.spec.disk import Disk, RecordKind, split_records
from memo.spec.layer_ops import LayerOp, in_sections
from memo.spec.slots import SlotLayout, slot_layout
from memo.spec.sweep import KeyValueLayout, key_value_layout, key_value_records
from memo.train.layer_profile import measure, obtain
from memo.train.tiled_layers import put_on_tiles


class FreeMemory(NamedTuple):
    """Bytes that this rank can take beside its states, for activations and what serves them."""

    device_bytes: int
    host_bytes: int
    disk: Disk | None = None


@dataclasses.dataclass(frozen=True)
class ChosenSwap:
    """What was decided on this rank, and why; `origin` says where the layer's profile came from.

    `key_plan`: that of keys and values, where layers are swept; else None.
    """

    plan: SwapPlan
    key_plan: SwapPlan | None
    problem: SwapProblem
    solution: SwapSolution
    origin: str

    def describe(self) -> str:
        return describe(self.solution, self.problem, self.origin)


def choose(
    config: RunConfig,
    mesh: Mesh,
    ops: Sequence[LayerOp],
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
    host: HostBudget,
) -> ChosenSwap:
    """Plan for a model that is built, from the profile of its first layer, whose gradients the first step zeroes.

    Of `host` its states have drawn what they take.
    """
    device = data_parallel.device
    layer = chunks[0].layers[0]
    assert isinstance(layer, TransformerLayer)

    def measured() -> LayerProfile:
        with data_parallel.scratch(data_parallel.layer_units[0]):
            return measure(config, mesh, layer, data_parallel.main_gradient, device)

    profile, origin = obtain(config, mesh, device, measured)
    return decide(config, mesh, ops, profile, origin, free_memory(device, free_bytes(device), host), device)


def decide(
    config: RunConfig,
    mesh: Mesh,
    ops: Sequence[LayerOp],
    profile: LayerProfile,
    origin: str,
    free: FreeMemory,
    device: torch.device,
) -> ChosenSwap:
    """Solve for what moves; the ranks of a stage agree on the least of their answers.

    Args:
        profile: the same on all ranks.
        free: beside all states, whether they exist already or not.
    """
    plan, key_plan = _plans(config, ops)
    problem = _problem(config, mesh, plan, profile, free)
    solution = _solve(config, problem)
    stays = torch.tensor(int(config.memory.offload_alpha == "auto" and solution.moves_nothing_is_best), device=device)
    for group in (mesh.tp, mesh.cp, mesh.dp, mesh.pp):
        all_reduce(stays, group, "min")
    if stays.item():
        return ChosenSwap(plan, key_plan, problem, solution, origin)
    if solution.limit == Limit.RESIDENT:  # here all would fit, but not on every rank: all of them move
        problem = dataclasses.replace(problem, resident_bytes=None)
        solution = _solve(config, problem)
    tiles = torch.tensor(list(solution.tiles.values()), device=device)
    for group in (mesh.tp, mesh.cp, mesh.dp):
        all_reduce(tiles, group, "min")
    agreed = dict(zip(solution.tiles, tiles.tolist(), strict=True))
    limit = solution.limit if agreed == solution.tiles else Limit.OTHERS
    solution = dataclasses.replace(predict(problem, agreed, solution.alphas, limit), moves_nothing_is_best=False)
    return ChosenSwap(plan, key_plan, problem, solution, origin)


def free_memory(device: torch.device, device_bytes: int, host: HostBudget) -> FreeMemory:
    """What is left of `host` and of its disk, whose rate the ranks of a node measure together."""
    return FreeMemory(device_bytes, host.left_bytes, None if host.disk is None else measured_disk(host.disk))


def _plans(config: RunConfig, ops: Sequence[LayerOp]) -> tuple[SwapPlan, SwapPlan | None]:
    """Of activations, and of keys and values: these have one slot, each part of which is free after its section."""
    if not config.memory.sweeps:
        return swap_plan(ops), None
    return swap_plan(in_sections(ops, resolved_sections(config))), swap_plan(ops, max_slots=1)


def _solve(config: RunConfig, problem: SwapProblem) -> SwapSolution:
    alpha = config.memory.offload_alpha
    return solve(problem) if isinstance(alpha, str) else solve_at(problem, alpha)


def start(
    config: RunConfig,
    mesh: Mesh,
    chosen: ChosenSwap,
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
    backend: StreamBackend,
    host: HostBudget,
) -> SwapRuntime:
    """Take the memory, records from `host`, and replace every plain layer by one that runs under the plan."""
    plan, key_plan, device = chosen.plan, chosen.key_plan, data_parallel.device
    layout, keys = slot_layout(config, chosen.solution.tiles), None if key_plan is None else key_value_layout(config)
    disk, key_disk = _disk_plans(plan, layout, key_plan, keys, host)
    runtime = (
        SwapRuntime(plan, layout, backend, device, host, disk=disk)
        if key_plan is None or keys is None
        else SweepRuntime(plan, layout, key_plan, keys, backend, device, host, disk=disk, key_disk=key_disk)
    )
    put_on_tiles(config, mesh, chunks, runtime, data_parallel)
    return runtime


def _disk_plans(
    plan: SwapPlan, layout: SlotLayout, key_plan: SwapPlan | None, keys: KeyValueLayout | None, host: HostBudget
) -> tuple[DiskPlan | None, DiskPlan | None]:
    """Which records of this rank are on disk, those of keys and values only where no others are left in memory.

    Ranks may differ in that: no rank waits for another one's records.
    """
    if host.disk is None:
        return None, None
    kinds = [
        RecordKind(0, 0) if key_plan is None or keys is None else key_value_records(key_plan.num_records, keys),
        RecordKind(plan.num_records, layout.moved_bytes),
    ]
    split = split_records(kinds, host.left_bytes)
    if split is None:
        raise no_staging(host.left_bytes, layout.moved_bytes)
    found: list[DiskPlan | None] = []
    for of_kind, kind, count in zip((key_plan, plan), kinds, split.on_disk, strict=True):
        buffers = min(kind.num_buffers, count)
        found.append(None if of_kind is None or not count else disk_plan(of_kind, count, buffers))
    return found[1], found[0]


def free_bytes(device: torch.device) -> int:
    """Memory of the device that this rank can still take; on a CPU its share of the node's."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_host_bytes() // local_world_size_from_env()


def _problem(config: RunConfig, mesh: Mesh, plan: SwapPlan, profile: LayerProfile, free: FreeMemory) -> SwapProblem:
    world_size = mesh.grid.world_size
    return swap_problem(
        config,
        world_size,
        num_slots=plan.num_slots,
        num_moves=plan.num_offloads,
        num_records=plan.num_records,
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        recompute_s=profile.recompute_s,
        offload=Link(profile.offload_bytes_per_s, profile.offload_under_compute_bytes_per_s),
        prefetch=Link(profile.prefetch_bytes_per_s, profile.prefetch_under_compute_bytes_per_s),
        limits=activation_limits(config, world_size, mesh.at.pp, free.device_bytes, free.host_bytes, free.disk),
    )

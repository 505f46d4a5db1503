"""Sets up token-wise swapping for a model that is already built: profile, plan, slots, wrapped layers."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from memo.artifacts.layer_profile import LayerProfile
from memo.config import RunConfig
from memo.config.derived import local_world_size_from_env, resolved_sections
from memo.config.memory import OffloadAlpha
from memo.estimate.host_memory import available_host_bytes
from memo.estimate.state_memory import state_bytes
from memo.estimate.swap_memory import NOTHING_BESIDE, BesideSlots
from memo.estimate.unseen_memory import CONTEXT, communicator_memory, links_of, page_table_bytes
from memo.estimate.verdict import sure_bytes
from memo.executor.disk_rate import measured_disk
from memo.executor.host_budget import HostBudget
from memo.executor.runtime import SwapRuntime, SweepRuntime
from memo.executor.streams import StreamBackend
from memo.mesh import Mesh
from memo.model.transformer import TransformerChunk
from memo.parallel.collectives import all_reduce
from memo.parallel.data import ShardedDataParallel
from memo.planner.alpha import no_staging, solve, solve_at
from memo.planner.alpha_table import describe, headline
from memo.planner.disk_plan import NOTHING_ON_DISK, DiskPlan, DiskPlans, disk_plan
from memo.planner.problem import Limit, Link, SwapProblem
from memo.planner.solution import SwapSolution, predict
from memo.planner.swap import SwapPlan, SweepPlans, swap_plan, sweep_plans
from memo.planner.swap_problem import activation_limits, swap_problem
from memo.spec.disk import NO_RECORDS, RecordKind, split_records
from memo.spec.hidden_ops import stage_hidden_ops
from memo.spec.layer_ops import LayerOp, swept_ops
from memo.spec.schedule import pipeline_of
from memo.spec.slots import SlotLayout, slot_layout
from memo.spec.stack import attending_layers, layers_with_attention_again
from memo.spec.sweep import key_value_layout, key_value_records
from memo.train.device import known_machine, taken_beside_torch
from memo.train.layer_profile import measure, obtain, one_of_each_kind
from memo.train.tiled_layers import hidden_sections, put_on_tiles
from memo.units import GIB


@dataclasses.dataclass(frozen=True)
class ChosenSwap:
    """The swap decision of this rank and its reasons; `origin` says where the layer's profile came from.

    `sweep`: the plans of inputs, keys, values and hidden states if layers are swept, else None.
    """

    plan: SwapPlan
    sweep: SweepPlans | None
    problem: SwapProblem
    solution: SwapSolution
    origin: str

    def describe(self) -> str:
        return describe(self.solution, self.problem, self.origin)

    def headline(self) -> str:
        return headline(self.solution, self.problem, self.origin)


def choose(
    config: RunConfig,
    mesh: Mesh,
    ops: Sequence[LayerOp],
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
    free_bytes: int,
    host: HostBudget,
) -> ChosenSwap:
    """Plan for a built model, from a profile of one layer of each kind. Measuring changes their gradients, which the
    first step zeroes.

    `free_bytes`: bytes of the device that are free beside all states; from `host` states have already drawn theirs.
    """
    device = data_parallel.device
    layers: dict[int, Any] = {}
    for chunk in chunks:
        layers |= dict(zip(chunk.layer_indices, chunk.layers, strict=True))
    units = {index: data_parallel.layer_units[position] for position, index in enumerate(layers)}
    of_kinds = {index: layers[index] for index in one_of_each_kind(config.model, layers)}

    gradient, states = data_parallel.main_gradients.main_gradient, lambda index: data_parallel.scratch(units[index])
    measured = functools.partial(measure, config, mesh, of_kinds, gradient, device, states)
    profile, origin = obtain(config, mesh, device, measured)
    return decide(config, mesh, ops, profile, origin, free_bytes, host, device)


def decide(
    config: RunConfig,
    mesh: Mesh,
    ops: Sequence[LayerOp],
    profile: LayerProfile,
    origin: str,
    free_bytes: int,
    host: HostBudget,
    device: torch.device,
) -> ChosenSwap:
    """Solve for the tiles that move, from a profile that is the same on all ranks; the ranks of a stage agree on the
    minimum of their solutions, and those of a node measure the disk together.

    `free_bytes`: bytes of the device for activations; `host`: a budget from which states have drawn their bytes.
    """
    plan, sweep = _plans(config, mesh, ops)
    problem = _problem(config, mesh, plan, sweep, profile, free_bytes, host)
    solution = _solve(config.memory.offload_alpha, problem)
    stays = torch.tensor(int(config.memory.offload_alpha == "auto" and solution.moves_nothing_is_best), device=device)
    for group in (mesh.tp, mesh.cp, mesh.dp, mesh.pp):
        all_reduce(stays, group, "min")
    if stays.item():
        return ChosenSwap(plan, sweep, problem, solution, origin)
    if solution.limit == Limit.RESIDENT:  # all activations fit here, but not on every rank, so all ranks move some
        problem = dataclasses.replace(problem, resident_bytes=None)
        solution = _solve(config.memory.offload_alpha, problem)
    tiles = torch.tensor(list(solution.tiles.values()), device=device)
    for group in (mesh.tp, mesh.cp, mesh.dp):
        all_reduce(tiles, group, "min")
    agreed = dict(zip(solution.tiles, tiles.tolist(), strict=True))
    limit = solution.limit if agreed == solution.tiles else Limit.OTHERS
    solution = predict(problem, agreed, solution.alphas, limit)._replace(moves_nothing_is_best=False)
    return ChosenSwap(plan, sweep, problem, solution, origin)


def free_device_bytes(config: RunConfig, mesh: Mesh, device: torch.device, host: HostBudget) -> int:
    """Bytes of the device for activations of this rank, up to --device-memory-gib; call it before states exist.

    The bytes of states and NCCL are subtracted, and on a GPU the reserve that a verdict of memo plan keeps back: whole
    pages, the error of the account, and page tables for all host memory that `host` may pin.
    """
    states_bytes = state_bytes(config, mesh.grid.world_size, mesh.at.pp).device
    free_bytes, beside_bytes = available_host_bytes() // local_world_size_from_env(), 0  # on a CPU: tensors only
    if device.type == "cuda":
        free_bytes, usable_bytes = torch.cuda.mem_get_info(device)
        # Memory that torch's allocator keeps from an earlier run of this process is free too.
        free_bytes += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        nccl_bytes = communicator_memory(config, mesh.grid.world_size, links_of(known_machine(device))).most
        beside_bytes = CONTEXT.foreseen + nccl_bytes
        connected_bytes = max(0, taken_beside_torch(device) - CONTEXT.foreseen)  # NCCL connects at the first messages
        kept_bytes = usable_bytes - int(sure_bytes(usable_bytes)) + page_table_bytes(host.left_bytes)
        free_bytes -= max(0, nccl_bytes - connected_bytes) + kept_bytes
    if config.memory.device_memory_gib is not None:
        free_bytes = min(free_bytes, int(config.memory.device_memory_gib * GIB) - beside_bytes)
    return free_bytes - states_bytes


def _plans(config: RunConfig, mesh: Mesh, ops: Sequence[LayerOp]) -> tuple[SwapPlan, SweepPlans | None]:
    """The plan of the slots' activations, and if layers are swept, the plans of all else that moves."""
    if not config.memory.sweeps:
        return swap_plan(ops), None
    again, sections = layers_with_attention_again(config), resolved_sections(config)
    hidden = None
    if config.memory.offload_hidden_states:
        pipeline = pipeline_of(config, mesh.grid.world_size)
        hidden = stage_hidden_ops(pipeline, mesh.at.pp, config.model.num_layers, sections)
    attending, slides = attending_layers(config.model), key_value_layout(config).slides
    return sweep_plans(swept_ops(ops, sections, again, attending, slides), hidden)


def _solve(alpha: OffloadAlpha, problem: SwapProblem) -> SwapSolution:
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
    """Allocate slots, and records from `host`; replace every plain layer by one that runs under the plan."""
    plan, sweep, device = chosen.plan, chosen.sweep, data_parallel.device
    layout = slot_layout(config, chosen.solution.tiles)
    disk = _disk_plans(config, chosen, layout, host)
    if sweep is None:
        runtime = SwapRuntime(plan, layout, backend, device, host, disk=disk.sections)
    else:
        keys, sections = key_value_layout(config), hidden_sections(config)
        runtime = SweepRuntime(plan, layout, sweep, keys, sections, backend, device, host, disk=disk)
    put_on_tiles(config, mesh, chunks, runtime, data_parallel.main_gradients)
    return runtime


def _disk_plans(config: RunConfig, chosen: ChosenSwap, layout: SlotLayout, host: HostBudget) -> DiskPlans:
    """Choose which records of this rank are on disk: first records of slots, then inputs, then keys and values; never
    hidden states.

    Ranks may choose differently, because no rank waits for another rank's records.
    """
    if host.disk is None:
        return NOTHING_ON_DISK
    keys_plan, inputs_plan, hidden_plan, _ = (None,) * 4 if chosen.sweep is None else chosen.sweep
    plans = [keys_plan, inputs_plan, chosen.plan]
    keys, inputs, slots = (0 if plan is None else plan.num_records for plan in plans)
    kinds = [
        key_value_records(keys, key_value_layout(config)) if keys else NO_RECORDS,
        RecordKind(inputs, layout.places["input"].num_bytes),
        RecordKind(slots, layout.moved_bytes),
    ]
    stays = 0 if hidden_plan is None else hidden_plan.num_records * layout.places["input"].num_bytes
    split = split_records(kinds, host.left_bytes - stays)
    if split is None:
        raise no_staging(host.left_bytes, stays, kinds)
    found: list[DiskPlan | None] = []
    for plan, kind, count in zip(plans, kinds, split.on_disk, strict=True):
        found.append(disk_plan(plan, count, kind.buffers_of(count), kind.parts) if plan is not None and count else None)
    return DiskPlans(*reversed(found))


def _problem(
    config: RunConfig,
    mesh: Mesh,
    plan: SwapPlan,
    sweep: SweepPlans | None,
    profile: LayerProfile,
    free_bytes: int,
    host: HostBudget,
) -> SwapProblem:
    world_size = mesh.grid.world_size
    disk = None if host.disk is None else measured_disk(host.disk)
    return swap_problem(
        config,
        world_size,
        num_slots=plan.num_slots,
        num_moves=plan.num_offloads,
        num_records=plan.num_records,
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        longer_s=profile.longer_s,
        recompute_s=profile.recompute_s,
        offload=Link(profile.offload_bytes_per_s, profile.offload_under_compute_bytes_per_s),
        prefetch=Link(profile.prefetch_bytes_per_s, profile.prefetch_under_compute_bytes_per_s),
        limits=activation_limits(config, world_size, mesh.at.pp, free_bytes, host.left_bytes, disk),
        beside=NOTHING_BESIDE if sweep is None else _beside_slots(sweep),
    )


def _beside_slots(sweep: SweepPlans) -> BesideSlots:
    inputs, hidden = sweep.inputs, sweep.hidden
    return BesideSlots(
        sweep.keys.num_records,
        0 if inputs is None else inputs.num_records,
        0 if hidden is None else hidden.num_records,
        0 if inputs is None else inputs.num_slots,
        0 if hidden is None else hidden.num_slots + 1,  # modules work in one more buffer
    )

"""Token-wise swapping for a model that is already built: profile, plan, slots, wrapped layers."""

import dataclasses
import os
from collections.abc import Sequence

import torch

from memo.config import RunConfig
from memo.config.derived import num_microbatches, resolved_offload_tiles
from memo.estimate.host_memory import available_host_bytes
from memo.estimate.memory import estimate_memory
from memo.executor.host_pool import host_budget_bytes
from memo.executor.layer import TokenwiseLayer, make_tiles
from memo.executor.runtime import SwapRuntime
from memo.executor.select import make_backend
from memo.executor.slots import LayerSizes, SlotLayout, plan_slot
from memo.mesh import Mesh
from memo.model.layer import LayerContext
from memo.model.rope import rope_table
from memo.model.transformer import TransformerChunk, torch_dtype
from memo.parallel.collectives import all_reduce
from memo.parallel.data import ShardedDataParallel
from memo.planner.alpha import solve, solve_at
from memo.planner.alpha_table import describe
from memo.planner.problem import Link, SwapProblem, SwapSolution, predict
from memo.planner.slot_costs import fixed_buffer_bytes, swap_groups
from memo.planner.swap import LayerOp, SwapPlan, swap_plan
from memo.profiler.layer import LayerProfile, ScratchGradients, ScratchMemory, profile_layer
from memo.skeleton import layer_bytes, skeletal_tensors


@dataclasses.dataclass(frozen=True)
class ChosenSwap:
    """What was decided on this rank, and why."""

    plan: SwapPlan
    problem: SwapProblem
    solution: SwapSolution

    def describe(self) -> str:
        return describe(self.solution, self.problem)


def choose(
    config: RunConfig,
    mesh: Mesh,
    ops: Sequence[LayerOp],
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
) -> ChosenSwap:
    """Profile one layer and solve for what moves; the ranks of a stage agree on the least of their answers."""
    plan = swap_plan(ops)
    device = data_parallel.buckets[0].weights.device
    profile = _profile(config, mesh, chunks[0], data_parallel, device)
    problem = _problem(config, mesh, plan, profile, device)
    alpha = config.memory.offload_alpha
    solution = solve(problem) if isinstance(alpha, str) else solve_at(problem, alpha)
    stays = torch.tensor([int(solution.moves_nothing_is_best and alpha == "auto")], device=device)
    tiles = torch.tensor(list(solution.tiles.values()), device=device)
    for group in (mesh.tp, mesh.cp, mesh.dp, mesh.pp):
        all_reduce(stays, group, "min")
    for group in (mesh.tp, mesh.cp, mesh.dp):
        all_reduce(tiles, group, "min")
    if not stays.item():
        agreed = dict(zip(solution.tiles, tiles.tolist(), strict=True))
        solution = dataclasses.replace(
            predict(problem, agreed, solution.alphas, solution.limit), moves_nothing_is_best=False
        )
    return ChosenSwap(plan, problem, solution)


def start(
    config: RunConfig,
    mesh: Mesh,
    chosen: ChosenSwap,
    chunks: Sequence[TransformerChunk],
    data_parallel: ShardedDataParallel,
) -> SwapRuntime:
    """Take the memory and replace every plain layer by one that runs under the plan."""
    memory = config.memory
    device = data_parallel.buckets[0].weights.device
    backend = make_backend(memory.offload_backend, device, check=memory.offload_check_races)
    layout = slot_layout(config, chosen.solution.tiles)
    runtime = SwapRuntime(chosen.plan, layout, backend, device, chosen.problem.host_bytes)
    tiles = make_tiles(config.data.seq_length // mesh.grid.cp, mesh.grid.tp, resolved_offload_tiles(config))
    for chunk in chunks:
        for position, layer in enumerate(chunk.layers):
            index = chunk.layer_indices[position]
            chunk.layers[position] = TokenwiseLayer(layer, index, tiles, runtime, data_parallel, mesh.tp)
    return runtime


def slot_layout(config: RunConfig, tiles: dict[str, int]) -> SlotLayout:
    """What one layer keeps in a rounding buffer of one rank when `tiles` of each group move."""
    parallel, training = config.parallel, config.training
    sizes = LayerSizes(
        tokens=config.data.seq_length // parallel.cp,
        batch=training.micro_batch_size,
        tp=parallel.tp,
        tiles=resolved_offload_tiles(config),
        dtype=torch_dtype(str(training.params_dtype)),
    )
    return plan_slot(skeletal_tensors(config.model), sizes, tiles)


def _profile(
    config: RunConfig,
    mesh: Mesh,
    chunk: TransformerChunk,
    data_parallel: ShardedDataParallel,
    device: torch.device,
) -> LayerProfile:
    """The first layer of this stage on random input; its gradients are zeroed by the first step."""
    tokens, batch = config.data.seq_length // mesh.grid.cp, config.training.micro_batch_size
    tiles = make_tiles(tokens, mesh.grid.tp, resolved_offload_tiles(config))
    memory = ScratchMemory(slot_layout(config, {}), device)
    sink = ScratchGradients(data_parallel.main_gradient)
    layer = TokenwiseLayer(chunk.layers[0], 0, tiles, memory, sink, mesh.tp)
    generator = torch.Generator(device=device).manual_seed(0)
    shape = (tokens // mesh.grid.tp, batch, config.model.hidden_size)
    x = torch.randn(shape, generator=generator, device=device).to(chunk.dtype)
    rope = None
    if config.model.position_embedding_type == "rope":
        positions = torch.arange(tokens, device=device).unsqueeze(1).expand(tokens, batch)
        rope = rope_table(config.model, positions, chunk.dtype)
    return profile_layer(layer, LayerContext(rope, None), x, (mesh.tp, mesh.cp))


def _problem(config: RunConfig, mesh: Mesh, plan: SwapPlan, profile: LayerProfile, device: torch.device) -> SwapProblem:
    memory, training = config.memory, config.training
    num_tokens = config.data.seq_length // mesh.grid.cp * training.micro_batch_size
    dtype = training.params_dtype
    assert dtype is not None, "prepare() resolves the dtype"
    sizes = layer_bytes(config.model, num_tokens, mesh.grid.tp, dtype, memory.offload_policy)
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    estimate = estimate_memory(config, mesh.grid.world_size, mesh.at.pp)
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_host_bytes() // local_ranks
    layers = config.model.num_layers // mesh.grid.pp
    return SwapProblem(
        policy=memory.offload_policy,
        tiles=resolved_offload_tiles(config),
        always=sizes.always,
        groups=swap_groups(sizes, profile.recompute_s, plan.num_slots),
        never=sizes.never,
        forward_s=profile.forward_s,
        backward_s=profile.backward_s,
        offload=Link(profile.offload_bytes_per_s, profile.offload_under_compute_bytes_per_s),
        prefetch=Link(profile.prefetch_bytes_per_s, profile.prefetch_under_compute_bytes_per_s),
        num_passes=layers * num_microbatches(config, mesh.grid.world_size),
        num_moves=plan.num_offloads,
        num_records=plan.num_records,
        host_bytes=host_budget_bytes(memory.offload_host_memory_gb, local_ranks),
        device_bytes=max(0, free_bytes - estimate.ends - estimate.workspace),
        fixed_buffer_bytes=fixed_buffer_bytes(sizes, plan.num_slots),
        resident_bytes=estimate.activations,
    )

"""Resolves --offload-granularity auto and --offload-states auto from the free memory, alike on all ranks."""

import math
from dataclasses import replace
from functools import partial

import torch

from memo.config import RunConfig
from memo.config.derived import local_world_size_from_env
from memo.config.memory import MemoryConfig
from memo.errors import ResourceError, is_first_of_node, tell
from memo.estimate.admission import Room, would_hold
from memo.estimate.host_memory import available_host_bytes, node_budget_bytes, total_host_bytes
from memo.estimate.node_share import with_lone_link
from memo.estimate.unseen_memory import CONTEXT, links_of
from memo.estimate.verdict import MemoryLimits
from memo.executor.disk_budget import disk_free_bytes
from memo.mesh import Mesh
from memo.mesh.objects import from_rank
from memo.parallel.collectives import all_reduce
from memo.search.granularity import Machine, resolve_granularity, resolve_states
from memo.spec.disk import disk_budget_bytes
from memo.spec.sweep import WHOLE, sweep_of, with_sweep
from memo.train.device import known_machine
from memo.train.outputs import loaded_config
from memo.units import GIB


def is_undecided(memory: MemoryConfig) -> bool:
    """Whether --offload-granularity is still auto: not decided yet, or this rank waits for another rank's choice."""
    return memory.offload_granularity == "auto"


def choose_memory(config: RunConfig, world_size: int, device: torch.device, *, must_fit: bool = True) -> RunConfig:
    """Return the configuration with auto for layers and states resolved from the memory that is free here.

    The first rank of each node decides about layers, because later ranks would count memory that their neighbours have
    taken; `agreed` tells the other ranks.

    Raises ResourceError if nothing fits, unless `must_fit` is false or --no-admission is given.
    """
    memory = config.memory
    if is_undecided(config.memory) and not memory.swaps:
        config = with_sweep(config, WHOLE)
    if not is_undecided(config.memory):
        if memory.offload_states != "auto":
            return config
        return resolve_states(config, _machine(config, world_size, device))
    if not is_first_of_node():
        return config
    machine = _machine(config, world_size, device)
    then = loaded_config(config)
    before = None if then is None else sweep_of(then)
    try:
        return resolve_granularity(config, machine, before=before, must_fit=must_fit)
    except ResourceError as error:
        overrule(config, error)
    return resolve_granularity(config, machine, before=before, must_fit=False)


def agreed(config: RunConfig, mesh: Mesh, device: torch.device) -> RunConfig:
    """Return the configuration with the memory settings of one rank. Collective; call it before anything is built.

    The rank is the one whose choice for --offload-granularity auto saves most device memory, because nodes may differ
    in their free memory; rank 0 if all choices are equal.
    """
    group, size = None if mesh.is_alone else mesh.world, mesh.grid.world_size
    rank_last = torch.tensor(_memory_saving_rank(config) * size + size - 1 - mesh.rank, device=device)
    source = size - 1 - int(all_reduce(rank_last, group, "max").item()) % size
    return replace(config, memory=from_rank(source, lambda: config.memory, group))


def room_of(memory: MemoryConfig, device: torch.device) -> Room:
    """The memory that is free here for a run."""
    node_ranks, host_bytes = local_world_size_from_env(), None
    if memory.offloads_states:
        host_bytes = node_budget_bytes(available_host_bytes(), memory.offload_host_memory_gib)
    if device.type == "cuda":
        return Room(*_device_room(device), 1, host_bytes, node_ranks, links_of(known_machine(device)))
    return Room(available_host_bytes(), total_host_bytes(), node_ranks, host_bytes, node_ranks)


def overrule(config: RunConfig, error: ResourceError) -> None:
    """Raises `error` of an estimate and names --no-admission, which overrules it; warns if that flag is given."""
    if config.training.admission:
        raise ResourceError(f"{error}; this is an estimate: --no-admission starts the run all the same") from None
    tell(f"warning: --no-admission overrules an estimate: {error}")


def sweeping_helps(config: RunConfig, world_size: int, device: torch.device) -> str:
    """Advice for a run with whole layers that does not fit; "" if sweeping its layers would not make it fit."""
    memory = config.memory
    if memory.sweeps or not memory.swaps or _is_held(config, world_size, device):
        return ""
    asked = replace(config, memory=replace(memory, offload_granularity="auto"))
    try:
        found = resolve_granularity(asked, _machine(config, world_size, device))
    except ResourceError:
        return ""
    if not _is_held(found, world_size, device):
        return ""
    return f"; --offload-granularity auto would start it with layers {sweep_of(found)}"


def _machine(config: RunConfig, world_size: int, device: torch.device) -> Machine:
    hardware, limits = with_lone_link(known_machine(device), world_size), _limits(config.memory, device)
    return Machine(world_size, hardware, limits, partial(_is_held, world_size=world_size, device=device))


def _limits(memory: MemoryConfig, device: torch.device) -> MemoryLimits:
    """Limits for a rank's device memory, and for the host memory and disk of all ranks of its node."""
    local_ranks, disk_bytes = local_world_size_from_env(), math.inf
    device_bytes = available_host_bytes() // local_ranks
    if device.type == "cuda":
        device_bytes, _ = _device_room(device)
    if memory.device_memory_gib is not None:
        device_bytes = min(device_bytes, int(memory.device_memory_gib * GIB))
    if memory.offload_nvme_path is not None:
        disk_bytes = disk_budget_bytes(disk_free_bytes(memory.offload_nvme_path), memory.offload_nvme_gib)
    host_bytes = node_budget_bytes(available_host_bytes(), memory.offload_host_memory_gib)
    return MemoryLimits(device_bytes, host_bytes, local_ranks, disk_bytes, links_of(known_machine(device)))


def _is_held(config: RunConfig, world_size: int, device: torch.device) -> bool:
    return would_hold(config, world_size, room_of(config.memory, device))


def _memory_saving_rank(config: RunConfig) -> int:
    """Order choices for --offload-granularity auto by the device memory they save; 0 while nothing is chosen."""
    if is_undecided(config.memory):
        return 0
    sweep = sweep_of(config)
    return (
        1
        + (bool(sweep.tiles) + sweep.hidden_on_host) * (config.model.num_layers + 1)
        + sweep.recompute_attention_layers
    )


def _device_room(device: torch.device) -> tuple[int, int]:
    """Bytes of a CUDA device that a run may take, including its CUDA context, and the bytes of the whole device.

    The query itself creates this process's context, which lowers the free bytes, although the forecast of a run counts
    a context. Therefore the bytes foreseen for a context are added to the free bytes.
    """
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    return min(free_bytes + CONTEXT.foreseen, total_bytes), total_bytes

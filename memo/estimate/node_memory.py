"""Bytes of host memory and of disks that the ranks of one node take."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf
from operator import add

from memo.config import RunConfig
from memo.estimate import swap_memory
from memo.estimate.hardware import Hardware
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.state_memory import state_bytes
from memo.spec.placement import placement_of
from memo.spec.slots import Moved


def node_bytes(
    config: RunConfig, world_size: int, hardware: Hardware, moved: Moved | None, host_bytes: float
) -> tuple[int, int]:
    """(host, disk): bytes of activations (`moved`; None if none move) and states of one node.

    Host memory, of which there are `host_bytes`, is filled first, as far as it surely fits; with --offload-nvme-path
    the rest is on the disks of `hardware`.
    """
    per_node = hardware.gpus_per_node
    if config.memory.offload_nvme_path is None or moved is None:
        return node_host_bytes(config, world_size, per_node, moved), 0
    in_memory = replace(config, memory=replace(config.memory, offload_nvme_path=None))
    whole = node_host_bytes(in_memory, world_size, per_node, moved)
    budget = node_budget_bytes(host_bytes, None)
    if whole <= budget:
        return whole, 0
    least = node_host_bytes(config, world_size, per_node, moved, hardware.nvme_budget_bytes)
    host = max(least, budget)
    return host, _node_disk_bytes(config, world_size, per_node, moved, host)


def node_host_bytes(
    config: RunConfig, world_size: int, gpus_per_node: int, moved: Moved | None, disk_bytes: float = inf
) -> int:
    """Host memory of the activations (`moved`; None if none move) and states of the ranks of one node.

    With --offload-nvme-path it is the least: `disk_bytes` of the node's disk are full of activations; default: all
    that can be there are.

    Which stages share a node depends on the launcher, so the ranks that need most are assumed to share one.
    """
    per_stage, on_disk = world_size // config.parallel.pp, disk_bytes / min(world_size, gpus_per_node)
    activations = swap_memory.host_bytes(config, world_size, moved, on_disk)
    ranks = map(add, activations, _states_on_host(config, world_size))
    return most_of_a_node(ranks, per_stage, gpus_per_node)


def _node_disk_bytes(config: RunConfig, world_size: int, gpus_per_node: int, moved: Moved, budget_bytes: float) -> int:
    """Bytes on a node's disk if its host memory is filled first; ranks share nodes as in `node_host_bytes`.

    Args:
        budget_bytes: host memory that activations and states of all ranks of a node may take.
    """
    per_stage, ranks = world_size // config.parallel.pp, min(world_size, gpus_per_node)
    spare_bytes = (budget_bytes - most_of_a_node(_states_on_host(config, world_size), per_stage, ranks)) / ranks
    found = swap_memory.disk_bytes(config, world_size, moved, [max(0.0, spare_bytes)] * config.parallel.pp)
    return most_of_a_node(found, per_stage, ranks)


def _states_on_host(config: RunConfig, world_size: int) -> list[int]:
    """Bytes of states in host memory, of a rank of each stage."""
    if not placement_of(config, world_size).optimizer:
        return [0] * config.parallel.pp
    return [state_bytes(config, world_size, stage).host for stage in range(config.parallel.pp)]


def most_of_a_node(ranks: Iterable[int], per_stage: int, gpus_per_node: int) -> int:
    """The largest sum over `gpus_per_node` ranks. `ranks`: bytes of one rank of each stage; each stage has `per_stage`
    ranks."""
    left, total = gpus_per_node, 0
    for num_bytes in sorted(ranks, reverse=True):
        count = min(left, per_stage)
        total += count * num_bytes
        left -= count
    return total

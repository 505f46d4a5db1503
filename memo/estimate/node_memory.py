"""What the ranks of one node take of its host memory and of its disks."""

from dataclasses import replace

from memo.config import RunConfig
from memo.estimate.hardware import Hardware
from memo.estimate.host_memory import node_budget_bytes
from memo.estimate.rank_memory import node_disk_bytes, node_host_bytes
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
    return host, node_disk_bytes(config, world_size, per_node, moved, host)

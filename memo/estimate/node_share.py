"""The part of a node that a run gets if it does not fill the node: that of its GPUs, unless the user says otherwise.

Clouds and schedulers give a job with n of a node's N GPUs about n / N of its host memory, CPU cores and disks; other
jobs use the rest. A user whose job has more names its host memory; cores, and the rates of memory and disks, then
follow the share of this memory.
"""

from dataclasses import replace

from memo.estimate.hardware import Hardware


def share_of_node(node: Hardware, gpus: int, host_memory_gib: float | None = None) -> float:
    """The share of each node that a run gets, above 0 and at most 1; `host_memory_gib`: what the user says the run
    has."""
    of_gpus = node.local_ranks(gpus) / node.gpus_per_node
    return of_gpus if host_memory_gib is None else max(of_gpus, min(1.0, host_memory_gib / node.host_memory_gib))


def part_of_node(node: Hardware, gpus: int, host_memory_gib: float | None = None) -> Hardware:
    """The machine with the run's part of each node: host memory, its rate, CPU cores, and disks.

    Links between GPUs are each GPU's own, and stay as they are. So are links to the host, except that a single GPU has
    the link to itself (`with_lone_link`).
    """
    share = share_of_node(node, gpus, host_memory_gib)
    return replace(
        with_lone_link(node, gpus),
        host_memory_gib=host_memory_gib or share * node.host_memory_gib,
        host_memory_gb_per_s=share * node.host_memory_gb_per_s,
        host_cores=max(1, int(share * node.host_cores)),
        nvme_gib=share * node.nvme_gib,
        nvme_gb_per_s=share * node.nvme_gb_per_s,
    )


def with_lone_link(hardware: Hardware, gpus: int) -> Hardware:
    """The machine with the host link of a run on `gpus` GPUs: a single GPU does not share the link."""
    rate = hardware.alone_gb_per_s
    return replace(hardware, offload_gb_per_s=rate, prefetch_gb_per_s=rate) if gpus == 1 and rate else hardware


def share_text(node: Hardware, gpus: int, host_memory_gib: float | None = None) -> str:
    """A text about the assumed part of a node; empty if the run gets whole nodes."""
    share = share_of_node(node, gpus, host_memory_gib)
    if share == 1.0:
        return ""
    part = part_of_node(node, gpus, host_memory_gib)
    cores = f"{part.host_cores} of {node.host_cores} cores"
    return (
        f"assumed: {node.local_ranks(gpus)} of a node's {node.gpus_per_node} GPUs, with {part.host_memory_gib:,g} of "
        f"its {node.host_memory_gib:,g} GiB of host memory and {cores}; --host-memory-gib says otherwise"
    )

"""Binds the threads of a rank to the CPUs of its GPU's NUMA node, so that its host memory lies there as well.

Host memory lies on the node of the CPU that touches it first. A copy between a GPU and the memory of another node
crosses the link between the sockets, which is slower and which all ranks share.
"""

import contextlib
import os
from pathlib import Path

from memo.estimate.host_cpus import allowed_cpus

SYSFS = Path("/sys")


def bind_near(pci_address: str, sysfs: Path = SYSFS) -> str:
    """Let this process run only on CPUs of the NUMA node of the device at `pci_address`, such as 0000:3b:00.0.

    A process that already runs only on that node (torchrun --numa-binding, Slurm) keeps its CPUs. Nothing is done if
    there is only one node, if the node of the device is unknown, or if this process may use none of its CPUs. Returns
    for people what was done, or why nothing was done. `sysfs` is for tests.
    """
    nodes = cpus_by_node(sysfs)
    if len(nodes) < 2:
        return "one NUMA node"
    node = numa_node(pci_address, sysfs)
    if node is None or node not in nodes:
        return "NUMA node of the GPU unknown"
    allowed = allowed_cpus()
    if allowed <= nodes[node]:
        return f"on NUMA node {node}, as started"
    near = allowed & nodes[node]
    if not near:
        return f"NUMA node {node} of the GPU has no CPU that this process may use"
    _run_on(near)
    return f"bound to NUMA node {node} of its GPU"


def numa_node(pci_address: str, sysfs: Path = SYSFS) -> int | None:
    """The NUMA node of a PCI device; None if the system does not know it (virtual machines report -1)."""
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_by_node(sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """{NUMA node: its CPUs}, without nodes that have no CPU; empty if the system does not report them."""
    nodes = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if cpus := _parse_list((folder / "cpulist").read_text()):
                nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _parse_list(text: str) -> frozenset[int]:
    """The CPUs of a list as sysfs writes it, such as 0-31,64-95."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return frozenset(cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1))


def _run_on(cpus: frozenset[int]) -> None:
    """Bind all threads of this process; threads that they start later inherit the CPUs."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # the thread has just ended
            os.sched_setaffinity(int(thread), cpus)

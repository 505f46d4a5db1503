"""A rank near its GPU: its threads on the CPUs of the GPU's NUMA node, and so the memory that they touch first.

Host memory belongs to the node of the CPU that touches it first. A copy between a GPU and another node's memory
crosses the link between the sockets, which is slower and which all ranks share.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from memo.estimate.host_cpus import allowed_cpus

SYSFS = Path("/sys")


@dataclass(frozen=True)
class Binding:
    """Where this rank runs, and what to say of it.

    Attributes:
        node: NUMA node that the rank was bound to, or found bound to; None where nothing was done.
    """

    node: int | None
    reason: str


def bind_near(pci_address: str | None, sysfs: Path = SYSFS) -> Binding:
    """Let this process run only on CPUs of the NUMA node of the device at `pci_address`, such as 0000:3b:00.0.

    A process that already runs on that node alone (torchrun --numa-binding, Slurm) keeps the CPUs it has. Nothing
    happens where there is one node, where the device's cannot be told, and where none of its CPUs is allowed.
    `sysfs` is for tests.
    """
    nodes = cpus_by_node(sysfs)
    if len(nodes) < 2:
        return Binding(None, "one NUMA node")
    node = numa_node(pci_address, sysfs)
    if node is None or node not in nodes:
        return Binding(None, "NUMA node of the GPU unknown")
    allowed = allowed_cpus()
    if allowed <= nodes[node]:
        return Binding(node, f"on NUMA node {node}, as started")
    near = allowed & nodes[node]
    if not near:
        return Binding(None, f"NUMA node {node} of the GPU has no CPU that this process may use")
    _run_on(near)
    return Binding(node, f"bound to NUMA node {node} of its GPU")


def numa_node(pci_address: str | None, sysfs: Path = SYSFS) -> int | None:
    """The node of a PCI device; None where the system does not know (virtual machines say -1)."""
    if pci_address is None:
        return None
    try:
        node = int((sysfs / "bus/pci/devices" / pci_address / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def cpus_by_node(sysfs: Path = SYSFS) -> dict[int, frozenset[int]]:
    """{NUMA node: its CPUs}, without nodes of memory alone; empty where the system does not tell."""
    nodes = {}
    for folder in (sysfs / "devices/system/node").glob("node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            if cpus := _parse_list((folder / "cpulist").read_text()):
                nodes[int(folder.name.removeprefix("node"))] = cpus
    return nodes


def _parse_list(text: str) -> frozenset[int]:
    """As sysfs writes CPUs: 0-31,64-95."""
    spans = [span.split("-") for span in text.strip().split(",") if span]
    return frozenset(cpu for span in spans for cpu in range(int(span[0]), int(span[-1]) + 1))


def _run_on(cpus: frozenset[int]) -> None:
    """All threads there are; those that they start later inherit it."""
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):  # one that has just ended
            os.sched_setaffinity(int(thread), cpus)

"""Divides a node's host memory among its ranks, before any rank allocates.

Memory that one rank has mapped is no longer free for the other ranks of its node, so all ranks read the free memory
once, at the same time. If the budget of the node is B, and its n ranks together put S bytes of states into host memory,
a rank with s bytes of states may take

    s + (B - S) / n

So states, whose size is fixed, come first, and activations share the rest.
"""

import hashlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from memo.config import RunConfig
from memo.errors import HostMemoryError
from memo.estimate.host_memory import available_host_bytes, node_budget_bytes
from memo.estimate.state_memory import state_bytes
from memo.executor.disk_budget import DiskBudget, disk_free_bytes
from memo.mesh import Mesh
from memo.parallel.collectives import all_gather
from memo.spec.disk import disk_budget_bytes
from memo.units import GIB, format_bytes

Contents = Literal["activations", "states"]

REMEDIES: dict[Contents, str] = {
    "activations": "lower --offload-alpha, or use more pipeline stages or nodes",
    "states": "lower --optimizer-offload-fraction, or spread the model over more nodes",
}


class Claim(NamedTuple):
    """The figures that each rank reports to all ranks.

    Attributes:
        free_bytes: free host memory as this rank sees it; its control group may allow less than the node has.
        states_bytes: bytes of its states in host memory.
        device_bytes: bytes of its other states if the device is the same memory (a CPU), else 0.
        node: a number that is equal on all ranks of one node.
        disk_free_bytes: free bytes on the disk of --offload-nvme-path, 0 without that flag.
    """

    free_bytes: int
    states_bytes: int = 0
    device_bytes: int = 0
    node: int = 0
    disk_free_bytes: int = 0


@dataclass
class HostBudget:
    """The host memory that one rank may take; states are allocated from it before activations.

    Attributes:
        granted_bytes: for states and activations together.
        source: a text for messages that says where the number comes from.
        is_limited: whether --offload-host-memory-gib sets the limit, rather than the free memory.
        drawn_bytes: bytes that have been allocated already.
        disk: the budget for activations that host memory does not hold; None without --offload-nvme-path.
    """

    granted_bytes: int
    source: str
    is_limited: bool = False
    drawn_bytes: int = 0
    disk: DiskBudget | None = None

    @property
    def left_bytes(self) -> int:
        return self.granted_bytes - self.drawn_bytes

    def draw(self, contents: Contents, record_bytes: int, num_records: int = 1) -> None:
        """Count records as allocated. Raises HostMemoryError, and counts nothing, if they exceed what is left."""
        num_bytes = record_bytes * num_records
        if num_bytes > self.left_bytes:
            more = f" besides {format_bytes(self.drawn_bytes)} that it has taken" if self.drawn_bytes else ""
            remedy = f"raise that flag, {REMEDIES[contents]}" if self.is_limited else REMEDIES[contents]
            raise HostMemoryError(
                f"{contents} in host memory need {format_records(num_records, record_bytes)}, but this rank may take "
                f"{format_bytes(self.left_bytes)}{more}, its part of {self.source}: {remedy}"
            )
        self.drawn_bytes += num_bytes


def settle(config: RunConfig, mesh: Mesh, device: torch.device) -> HostBudget:
    """Return the budget of this rank. Collective over all ranks, before any rank allocates memory for its states.

    Ranks are on one node if the names of their hosts are equal; in a simulated world there is only this rank.

    Args:
        config: the configuration that all ranks have agreed on.
    """
    states, directory = state_bytes(config, mesh.grid.world_size, mesh.at.pp), config.memory.offload_nvme_path
    mine = Claim(
        free_bytes=available_host_bytes(),
        states_bytes=states.host,
        device_bytes=states.device if device.type == "cpu" else 0,
        node=_number_of(socket.gethostname()),
        disk_free_bytes=0 if directory is None else disk_free_bytes(directory),
    )
    gathered = all_gather(torch.tensor([mine], device=device), None if mesh.is_alone else mesh.world)
    claims = [Claim(*row) for row in gathered.tolist()]
    neighbours = [claim for claim in claims if claim.node == mine.node]
    budget = budget_of(mine, neighbours, config.memory.offload_host_memory_gib)
    if directory is not None:
        free_bytes = min(claim.disk_free_bytes for claim in neighbours)
        disk_bytes = disk_budget_bytes(free_bytes, config.memory.offload_nvme_gib)
        budget.disk = DiskBudget(directory, disk_bytes // len(neighbours))
    return budget


def budget_of(mine: Claim, node: Sequence[Claim], limit_gib: float | None = None) -> HostBudget:
    """The budget of the rank with the claim `mine`, which is one of the claims in `node`.

    Args:
        limit_gib: --offload-host-memory-gib, GiB for the whole node; None: limited by the free memory alone.
    """
    free_bytes = max(0, min(claim.free_bytes for claim in node) - sum(claim.device_bytes for claim in node))
    budget_bytes = node_budget_bytes(free_bytes, limit_gib)
    spare_bytes = budget_bytes - sum(claim.states_bytes for claim in node)
    granted_bytes = max(0, mine.states_bytes + spare_bytes // len(node))
    is_limited = limit_gib is not None and limit_gib * GIB <= free_bytes
    beside = " beside the model" if mine.device_bytes else ""
    source = f"{format_bytes(budget_bytes)}, as {format_bytes(free_bytes)} of this node are free{beside}"
    if is_limited:
        source = f"--offload-host-memory-gib {limit_gib:g}"
    ranks = "1 rank" if len(node) == 1 else f"{len(node)} ranks"
    return HostBudget(granted_bytes, f"{source}, for {ranks} of this node", is_limited)


def format_records(num_records: int, record_bytes: int) -> str:
    """Return the total size of records as text, with their number and size."""
    whole = format_bytes(num_records * record_bytes)
    return whole if num_records == 1 else f"{whole} = {num_records} records x {format_bytes(record_bytes)}"


def _number_of(name: str) -> int:
    """A hash of a name, int64."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)

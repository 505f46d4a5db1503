"""What a rank may take of its node's host memory: settled for all ranks of a node before any of them takes some.

What one rank has mapped is no longer free for its neighbours, so all ask at once, and none asks a second time. Of a
node's budget B, whose n ranks put states S in all into host memory, a rank with states s may take

    s + (B - S) / n

so that states, which cannot give way, come first, and activations share the rest.
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
from memo.mesh import Mesh
from memo.parallel.collectives import all_gather
from memo.units import GIB, format_bytes

Contents = Literal["activations", "states"]

REMEDIES: dict[Contents, str] = {
    "activations": "lower --offload-alpha, or use more pipeline stages or nodes",
    "states": "lower --optimizer-offload-fraction, or spread the model over more nodes",
}


class Claim(NamedTuple):
    """What one rank tells the others.

    Attributes:
        free_bytes: of host memory, as this rank sees it (its control group may hold less than the node).
        states_bytes: of its states in host memory.
        device_bytes: of its other states, where the device is the same memory (a CPU); else 0.
        node: equal on ranks of one node.
    """

    free_bytes: int
    states_bytes: int = 0
    device_bytes: int = 0
    node: int = 0


@dataclass
class HostBudget:
    """Host memory of one rank, from which states draw before activations.

    Attributes:
        granted_bytes: to both together.
        source: what they are a part of, for messages.
        is_limited: by --offload-host-memory-gb, not by what is free.
        drawn_bytes: of these.
    """

    granted_bytes: int
    source: str
    is_limited: bool = False
    drawn_bytes: int = 0

    @property
    def left_bytes(self) -> int:
        return self.granted_bytes - self.drawn_bytes

    def draw(self, contents: Contents, record_bytes: int, num_records: int = 1) -> None:
        """Count records as taken. Raises HostMemoryError, and counts nothing, where they exceed what is left."""
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
    """The budget of this rank; collective over all ranks, before any of them takes memory for its states.

    A simulated world has no neighbours. Ranks are of one node where the names of their hosts are equal.

    Args:
        config: as all ranks have agreed on it.
    """
    states = state_bytes(config, mesh.grid.world_size, mesh.at.pp)
    mine = Claim(
        free_bytes=available_host_bytes(),
        states_bytes=states.host,
        device_bytes=states.device if device.type == "cpu" else 0,
        node=_number_of(socket.gethostname()),
    )
    told = all_gather(torch.tensor([mine], device=device), None if mesh.is_alone else mesh.world)
    claims = [Claim(*row) for row in told.tolist()]
    neighbours = [claim for claim in claims if claim.node == mine.node]
    return budget_of(mine, neighbours, config.memory.offload_host_memory_gb)


def budget_of(mine: Claim, node: Sequence[Claim], limit_gib: float | None = None) -> HostBudget:
    """The budget of the rank that claims `mine`, one of all claims of its `node`.

    Args:
        limit_gib: --offload-host-memory-gb, GiB for the whole node; None: what is free decides.
    """
    free_bytes = max(0, min(claim.free_bytes for claim in node) - sum(claim.device_bytes for claim in node))
    budget_bytes = node_budget_bytes(free_bytes, limit_gib)
    spare_bytes = budget_bytes - sum(claim.states_bytes for claim in node)
    granted_bytes = max(0, mine.states_bytes + spare_bytes // len(node))
    is_limited = limit_gib is not None and limit_gib * GIB <= free_bytes
    beside = " beside the model" if mine.device_bytes else ""
    source = f"{format_bytes(budget_bytes)}, as {format_bytes(free_bytes)} of this node are free{beside}"
    if is_limited:
        source = f"--offload-host-memory-gb {limit_gib:g}"
    ranks = "1 rank" if len(node) == 1 else f"{len(node)} ranks"
    return HostBudget(granted_bytes, f"{source}, for {ranks} of this node", is_limited)


def format_records(num_records: int, record_bytes: int) -> str:
    """A size for people, with what it is made of."""
    whole = format_bytes(num_records * record_bytes)
    return whole if num_records == 1 else f"{whole} = {num_records} records x {format_bytes(record_bytes)}"


def _number_of(name: str) -> int:
    """int64, equal for equal names."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big", signed=True)

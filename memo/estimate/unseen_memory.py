"""Memory of a GPU that torch's allocator does not see: CUDA's context, NCCL's communicators, page tables.

    context      CUDA's context, and the kernels of torch, cuBLAS, cuDNN and Triton, which are loaded when first used
    collective   buffers of rings, to both neighbours, and of trees, for each communicator that collectives use
    neighbour    buffers of the channels to one peer rank, for each communicator that point-to-point messages use
    all-to-all   these buffers for every other rank of the node, and one shared buffer for all ranks of other nodes
    page tables  the GPU's tables of the host memory that it copies from and to

The foreseen context was measured on memo's own runs. All other numbers are published figures, with their sources
beside them; `least` and `most` are the lowest and the highest published figure. The sum was not fitted. Two comparisons
with published figures of whole programs: for tp 2 x pp 2 x dp 2 on 8 H100 the sum foresees 3.1 GiB for six
communicators, and Megatron-LM with about twice as many communicators held 7 GB (verl pull 6408); for cp 8 by all-to-all
it foresees 5.9 GiB in all with three communicators, and a program with one communicator held 4.3 GB (NCCL issue 1685).
"""

import math
from functools import lru_cache
from typing import NamedTuple

from memo.config import RunConfig
from memo.estimate.hardware import Hardware
from memo.spec.process_groups import PlannedGroup, Traffic, groups_of, traffic_of
from memo.units import MIB


class Unseen(NamedTuple):
    """Bytes that are foreseen, with the lowest and the highest bytes that published figures allow."""

    least: int
    foreseen: int
    most: int

    @property
    def below(self) -> int:
        """Bytes by which the memory may be less than foreseen."""
        return self.foreseen - self.least

    @property
    def above(self) -> int:
        """Bytes by which the memory may be more than foreseen."""
        return self.most - self.foreseen

    def __add__(self, other: object) -> "Unseen":
        assert isinstance(other, Unseen)
        return Unseen(*(one + two for one, two in zip(self, other, strict=True)))

    def times(self, share: float) -> "Unseen":
        return Unseen(*(math.ceil(share * one) for one in self))


NOTHING = Unseen(0, 0, 0)


class Links(NamedTuple):
    """Links between GPUs as NCCL finds them.

    Attributes:
        per_node: ranks of a run that share a node.
        are_fast: whether the links of these ranks are faster than PCIe.
    """

    per_node: int = 8
    are_fast: bool = True


FAST_NODE = Links()
"""Links assumed if no machine is known: a node of eight GPUs with NVLink, on which NCCL takes most memory."""

CONTEXT = Unseen(426 * MIB, 840 * MIB, 1300 * MIB)
"""Least: a context that torch 2.10 with CUDA 13 has just created, on an RTX 6000 Ada (unsloth-zoo pull 1053). Foreseen:
memory in use on the device beyond torch's reserved memory, after steps of memo on an H200 with torch 2.11 and CUDA
13.0: 837 to 897 MiB in nine runs (BENCHMARKS.md). Most: 1.27 GiB beside torch on one GPU of 79.3 GiB (vLLM pull
11743)."""

_OF_PAIRS = Unseen(288 * MIB, 544 * MIB, 688 * MIB)
_OF_MORE = Unseen(288 * MIB, 688 * MIB, 1024 * MIB)
"""Bytes of one communicator's collectives, for two ranks and for more. Foreseen: measured on four A100 with NVLink, for
each of their process groups (NCCL issue 964). Least: rings alone, because NCCL connects trees and the switch's
multicast when they are first used (NCCL_RUNTIME_CONNECT, from 2.22 on): 24 channels of 12 MiB. Most:
about 1 GiB a rank at tp 4 (vLLM pull 51485)."""

_OF_A_PEER = Unseen(384 * MIB, 447 * MIB, 480 * MIB)
"""Bytes of messages to and from one peer, whatever their sizes. Foreseen: the first all-to-all of 8 H100 took 3.28 GB
of each GPU for 7 peers (NCCL issue 1685). Most: the same figure read as GiB. Least: NCCL's source (2.29:
transport/p2p.cc, init.cc): 32 channels, each with 10 MiB to receive (4 MiB, and 5.2 for the two protocols of small
messages) and 2 MiB to send."""

_OTHER_NODES = Unseen(64 * MIB, 512 * MIB, 512 * MIB)
"""Bytes of messages to any number of ranks of other nodes: one buffer for all. Foreseen and most: measured on 8 B300
(NCCL issue 2363). Least: from transport/net.cc, with 32 channels and parts of 128 KiB."""

_SLOW_COLLECTIVE_SHARE, _SLOW_PEER_SHARE = 4 / 24, 2 / 32
"""Channels over PCIe (4, and 2 to each peer: the log of nccl-tests issue 321) divided by the channels of the figures
above (24 and 32: the log of Megatron-LM issue 516). All buffers belong to channels (NCCL issue 986)."""

_BYTES_A_PAGE, _PAGE_ENTRY_BYTES = 4096, 8
"""NVIDIA's open-gpu-doc (mmu formats of Pascal to Hopper): an entry of a page table has 8 bytes, and pages of host
memory have the host's 4 KiB. The tables take 2 MiB for each GiB, or nothing if the driver keeps them in host memory or
if the host uses huge pages."""


def page_table_bytes(pinned_bytes: int) -> int:
    """Return the bytes of a GPU's page tables over `pinned_bytes` of a rank's pinned host memory."""
    return math.ceil(pinned_bytes / _BYTES_A_PAGE) * _PAGE_ENTRY_BYTES


def unseen_memory(config: RunConfig, world_size: int, links: Links = FAST_NODE, pinned_bytes: int = 0) -> Unseen:
    """Return the GPU memory of one rank of a checked run beside torch's; `pinned_bytes`: its pinned host memory."""
    tables = page_table_bytes(pinned_bytes)
    return CONTEXT + communicator_memory(config, world_size, links) + Unseen(0, tables, tables)


def communicator_memory(config: RunConfig, world_size: int, links: Links = FAST_NODE) -> Unseen:
    """Return the memory that NCCL takes for all communicators of a rank, after each was used once."""
    return _of_all(groups_of(config, world_size), config.parallel.cp_comm_type, links)


@lru_cache(maxsize=256)
def _of_all(groups: tuple[PlannedGroup, ...], cp_comm_type: str, links: Links) -> Unseen:
    used: dict[tuple[str, Traffic], int] = {}  # number of ranks, by communicator and kind of traffic
    for group in groups:
        used[group.communicator, traffic_of(group, cp_comm_type)] = group.size
    parts = (_of(traffic, size, links) for (_, traffic), size in used.items())
    return Unseen(*map(sum, zip(NOTHING, *parts, strict=True)))


@lru_cache(maxsize=256)
def _of(traffic: Traffic, size: int, links: Links) -> Unseen:
    if traffic == "collective":
        return (_OF_PAIRS if size == 2 else _OF_MORE).times(1.0 if links.are_fast else _SLOW_COLLECTIVE_SHARE)
    peer = _OF_A_PEER.times(1.0 if links.are_fast else _SLOW_PEER_SHARE)
    if traffic == "neighbour":
        return peer
    near = peer.times(min(size, links.per_node) - 1)
    return near + _OTHER_NODES if size > links.per_node else near


def links_of(machine: Hardware) -> Links:
    """Return the links of a machine: one that is planned for, or one that runs."""
    return Links(machine.gpus_per_node, machine.has_fast_links)

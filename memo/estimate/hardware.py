"""Devices and their nodes: the rates that the vendor states, and the shares of these rates that training reaches.

A `Hardware` has peaks, memory and links. Its `Efficiency` has the shares, and is the only place with fitted times.
`memo.estimate.hardware_files` reads the known machines, and a user's.
"""

from dataclasses import dataclass
from typing import Annotated, Literal

from memo.artifacts.fields import in_range
from memo.config.training import Dtype
from memo.errors import ConfigError
from memo.spec.disk import Disk, disk_budget_bytes
from memo.units import GIB

DRIVER_GIB, DRIVER_SHARE = 0.5, 0.0025
"""Memory of a GPU that the driver keeps: torch reports this many GiB, and this share, less than nvidia-smi. In public
reports of 23 GPUs (tests/estimate/test_estimate_machines.py) the difference is 0.3 GiB (RTX 3090) to 1.1 GiB (GH200);
these numbers give 0.55 to 1.2 GiB."""

_FASTEST_PCIE_GB_PER_S = 64
"""PCIe 5.0 with 16 lanes, one direction."""

Size = Annotated[float, in_range(above=0, high=1e18)]
_SizeOrNone = Annotated[float, in_range(0, 1e18)]
_Share = Annotated[float, in_range(above=0, high=1)]
_ExtraSeconds = Annotated[float, in_range(0, 1)]
_Count = Annotated[int, in_range(1, 1 << 20)]
_CountOrNone = Annotated[int, in_range(0, 1 << 20)]


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that kernels and collectives reach.

    Attributes:
        matmul: share of the FLOP/s that matrix products with three large sizes reach.
        matmul_half_size: a product with one size as small as this reaches half of `matmul`.
        attention_forward, attention_backward: share of the FLOP/s that exact attention with heads of 128 reaches, if
            FLOPs are counted as the mathematics needs them (causal half, backward twice forward).
        attention_half_head: heads of that size reach half of the limit for large heads (FlashAttention-2, fig. 4
            to 6: heads of 64 reach about 0.8 of heads of 128).
        memory: share of the memory's rate that norms, activations, sums and the optimizer reach.
        node: share of the link inside a node that collectives reach.
        network: share of the network between nodes that collectives reach.
        host_memory: share of the host memory's rate that the optimizer reaches on all CPU cores.
        kernel_s: seconds lost around each kernel: launch, first and last wave.
        collective_s: seconds before the first byte of a collective or a message between two ranks.
        host_core_gb_per_s: host memory traffic of the optimizer on one CPU core, 10^9 bytes a second.
        source: where the numbers come from.
        hop_s: seconds added to collective_s for each further rank of an all-gather or reduce-scatter, which goes round
            a ring; 0 where collective_s was fitted to runs of all sizes.
        expert_matmul: rate of the products of experts, the sorting of rows included, as a share of the rate of dense
            products of the same sizes. Chosen so that three published steps of Qwen3-30B-A3B (prime-rl, H100 and H200,
            16K tokens, 1,024 rows an expert) are foreseen within 6 %; each of them alone would give 0.34 to 0.39. A
            step of memo, gpt-oss-20b with quantized experts and adapters at 64K tokens on one H200, would give 0.47.
        host_kernel_s: seconds that the host takes to start a kernel of memo's, Python and autograd included; 0 where
            kernels start at once.
    """

    matmul: _Share
    matmul_half_size: Size
    attention_forward: _Share
    attention_backward: _Share
    attention_half_head: Size
    memory: _Share
    node: _Share
    network: _Share
    host_memory: _Share
    kernel_s: Size
    collective_s: Size
    host_core_gb_per_s: Size
    source: str
    hop_s: _ExtraSeconds = 0.0
    expert_matmul: _Share = 0.36
    host_kernel_s: _ExtraSeconds = 0.0


def visible_gib(memory_gib: float) -> float:
    """GiB that torch reports of a GPU for which nvidia-smi reports `memory_gib`."""
    return max(0.0, (1.0 - DRIVER_SHARE) * memory_gib - DRIVER_GIB)


@dataclass(frozen=True)
class Hardware:
    """One device and its node.

    Attributes:
        device: torch's name of the device type.
        driver_name, capability, multiprocessors: as a GPU's driver reports them, the compute capability times ten; the
            emulated GPU of memo.rehearsal reports the same. A CPU has none of these.
        peak_tflops: TFLOP/s of dense matrix products, by dtype.
        memory_gib: memory of one device, as its driver reports it (nvidia-smi).
        memory_gb_per_s: rate of one device's memory, 10^9 bytes a second (here and below).
        offload_gb_per_s, prefetch_gb_per_s: rates from one device to pinned host memory and back while all devices of
            a node copy and compute.
        alone_gb_per_s: rate of either direction, both at once, while no other device of the node copies; 0: the same
            rates as above.
        copies_overlap: whether copies run at the same time as compute; on CPUs they take turns.
        node_gb_per_s: rate from one device to others of its node, one direction.
        network_gb_per_s: each device's part of the network to other nodes, one direction.
        host_memory_gib: host memory of one node.
        host_memory_gb_per_s, host_cores: rate of the host memory and physical CPU cores of one node, all sockets.
        source: where the numbers come from.
        nvme_gib, nvme_gb_per_s: size of the node's local disks for activations, and their rate in either direction; 0
            without disks.
    """

    name: str
    device: Literal["cuda", "cpu"]
    driver_name: str
    capability: _CountOrNone
    multiprocessors: _CountOrNone
    peak_tflops: dict[Dtype, Size]
    memory_gib: Size
    memory_gb_per_s: Size
    offload_gb_per_s: Size
    prefetch_gb_per_s: Size
    copies_overlap: bool
    node_gb_per_s: Size
    network_gb_per_s: Size
    gpus_per_node: _Count
    host_memory_gib: Size
    host_memory_gb_per_s: Size
    host_cores: _Count
    efficiency: Efficiency
    source: str
    alone_gb_per_s: _SizeOrNone = 0.0
    nvme_gib: _SizeOrNone = 0.0
    nvme_gb_per_s: _SizeOrNone = 0.0

    @property
    def visible_gib(self) -> float:
        """GiB that torch reports of a device's memory; of a GPU without the part that the driver keeps."""
        return visible_gib(self.memory_gib) if self.device == "cuda" else self.memory_gib

    @property
    def has_fast_links(self) -> bool:
        """Whether devices of a node talk over links that are faster than PCIe, such as NVLink."""
        return self.node_gb_per_s > _FASTEST_PCIE_GB_PER_S

    @property
    def host_memory_bytes(self) -> int:
        return int(self.host_memory_gib * GIB)

    @property
    def nvme_budget_bytes(self) -> int:
        """Bytes of the node's empty disks that activations of all its ranks may take."""
        return disk_budget_bytes(self.nvme_gib * GIB, None)

    def local_ranks(self, world_size: int) -> int:
        """Ranks of a run that share a node."""
        return min(world_size, self.gpus_per_node)

    def nvme_of_rank(self, world_size: int) -> Disk | None:
        """One rank's part of the node's disks while all ranks of the node use them; None without disks."""
        if not self.nvme_gib:
            return None
        ranks = self.local_ranks(world_size)
        rate = self.nvme_gb_per_s * 1e9 / ranks
        return Disk(self.nvme_budget_bytes // ranks, rate, rate)

    def host_bytes_per_s(self, ranks: int) -> float:
        """Host memory traffic of one of `ranks` ranks of a node whose CPUs all update weights."""
        memory = self.host_memory_gb_per_s * self.efficiency.host_memory
        return min(memory, self.host_cores * self.efficiency.host_core_gb_per_s) * 1e9 / ranks

    def peak_flops(self, dtype: Dtype) -> float:
        """FLOP/s in a dtype. Raises ConfigError if the machine lists no peak for it."""
        if dtype not in self.peak_tflops:
            raise ConfigError(
                f"--hardware {self.name} has no peak for --dtype {dtype}: add it to peak_tflops, or use --dtype "
                f"{' or '.join(self.peak_tflops)}"
            )
        return self.peak_tflops[dtype] * 1e12

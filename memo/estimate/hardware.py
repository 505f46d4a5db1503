"""Devices and the machines around them: what the vendor promises, and which share of it software reaches.

A `Hardware` is the machine: peaks, memory, links. Its `Efficiency` is what is left of them in training, and the
only place with fitted numbers. `memo.estimate.hardware_table` holds the known ones, `memo.estimate.hardware_file`
reads others.
"""

from dataclasses import dataclass
from typing import Literal

from memo.config.training import Dtype
from memo.errors import ConfigError
from memo.units import GIB


@dataclass(frozen=True)
class Efficiency:
    """Shares of the peaks that kernels and collectives reach.

    Attributes:
        matmul: of the FLOP/s, by matrix products whose three sizes are all large.
        matmul_half_size: a product with one size of so many reaches half of that.
        attention_forward, attention_backward: of the FLOP/s, counted as the mathematics needs them (causal half,
            backward twice forward), by exact attention with heads of 128.
        attention_half_head: heads of that size reach half of what endless ones would (FlashAttention-2, fig. 4
            to 6: heads of 64 reach about 0.8 of heads of 128).
        memory: of the memory's rate, by norms, activations, sums, the optimizer.
        node: of the link inside a node, by collectives.
        network: of the network between nodes, by collectives.
        host_memory: of the host memory's rate, by the optimizer on all CPU cores.
        kernel_s: seconds lost around each kernel: launch, first and last wave.
        collective_s: seconds before a collective's or a message's first byte.
        host_core_gb_per_s: host memory traffic of the optimizer on one CPU core, 10^9 bytes a second.
    """

    matmul: float
    matmul_half_size: float
    attention_forward: float
    attention_backward: float
    attention_half_head: float
    memory: float
    node: float
    network: float
    host_memory: float
    kernel_s: float
    collective_s: float
    host_core_gb_per_s: float
    source: str


@dataclass(frozen=True)
class Hardware:
    """One device and its node.

    Attributes:
        device: what torch calls it.
        driver_name, capability, multiprocessors: what a GPU's driver tells of it, the compute capability times ten; for
            an emulated one (memo.rehearsal). A CPU has none.
        peak_tflops: dense matrix products, by dtype.
        memory_gib: of one device, as its driver reports it.
        memory_gb_per_s: of one device, 10^9 bytes a second (here and below).
        offload_gb_per_s, prefetch_gb_per_s: one device to pinned host memory and back, while all devices of a
            node copy and compute.
        copies_overlap: copies run beside compute; on CPUs they take turns.
        node_gb_per_s: of one device to others of its node, one direction.
        network_gb_per_s: each device's part of the network to other nodes, one direction.
        host_memory_gib: of one node.
        host_memory_gb_per_s, host_cores: of one node, all sockets: rate of its memory, and physical CPU cores.
        source: where the numbers come from.
    """

    name: str
    device: Literal["cuda", "cpu"]
    driver_name: str
    capability: int
    multiprocessors: int
    peak_tflops: dict[Dtype, float]
    memory_gib: float
    memory_gb_per_s: float
    offload_gb_per_s: float
    prefetch_gb_per_s: float
    copies_overlap: bool
    node_gb_per_s: float
    network_gb_per_s: float
    gpus_per_node: int
    host_memory_gib: float
    host_memory_gb_per_s: float
    host_cores: int
    efficiency: Efficiency
    source: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)

    @property
    def host_memory_bytes(self) -> int:
        return int(self.host_memory_gib * GIB)

    def host_bytes_per_s(self, ranks: int) -> float:
        """Host memory traffic of one of `ranks` ranks of a node whose CPUs all update weights."""
        memory = self.host_memory_gb_per_s * self.efficiency.host_memory
        return min(memory, self.host_cores * self.efficiency.host_core_gb_per_s) * 1e9 / ranks

    def peak_flops(self, dtype: Dtype) -> float:
        """FLOP/s. Raises ConfigError for a dtype that the machine lists no peak for."""
        if dtype not in self.peak_tflops:
            raise ConfigError(
                f"--hardware {self.name} has no peak for --dtype {dtype}: add it to peak_tflops, or use --dtype "
                f"{' or '.join(self.peak_tflops)}"
            )
        return self.peak_tflops[dtype] * 1e12

"""Seconds of one kernel or collective on one rank: the peaks of `Hardware` times the shares of its `Efficiency`."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from memo.config.grid import RankGrid
from memo.config.training import Dtype
from memo.estimate.hardware import Hardware
from memo.simulate.cost import Cost
from memo.units import element_bytes

_LARGE_HEAD = 128
"""The head size for which the efficiencies of attention are given."""


class Group(NamedTuple):
    """A group of `size` ranks in rows: ranks of a row are `stride` apart, and rows are `row_stride` apart."""

    size: int
    stride: int
    row: int = 0
    """Ranks of one row; 0: all ranks are in one row."""
    row_stride: int = 0

    @classmethod
    def along(cls, grid: RankGrid, inner: str, outer: str) -> "Group":
        """Return the ranks that differ along two axes only; `inner` is the faster axis."""
        row, rows = getattr(grid, inner), getattr(grid, outer)
        if row > 1 and rows > 1 and grid.stride(outer) > row * grid.stride(inner):
            return cls(row * rows, grid.stride(inner), row, grid.stride(outer))
        return cls(row * rows, grid.stride(inner if row > 1 else outer))

    def members_per_node(self, ranks_per_node: int) -> int:
        """Number of members on the node of the first member; ranks fill the nodes in order."""
        row = self.row or self.size
        rows = min(self.size // row, ranks_per_node // self.row_stride) if self.row else 1
        return max(1, min(row, ranks_per_node // self.stride)) * max(1, rows)


@dataclass(frozen=True)
class Kernels:
    """Seconds of kernels and collectives on one machine in one dtype."""

    hardware: Hardware
    dtype: Dtype

    @cached_property
    def narrow(self) -> int:
        """Bytes of an element of weights and activations."""
        return element_bytes(self.dtype)[0]

    @cached_property
    def wide(self) -> int:
        """Bytes of an element of sums and gradients."""
        return element_bytes(self.dtype)[1]

    @property
    def adds_in_products(self) -> bool:
        """Whether a product can add a weight gradient to the main gradient itself (memo.parallel.weight_gradients)."""
        return self.hardware.device == "cuda" or self.narrow == self.wide

    @cached_property
    def kernel_s(self) -> float:
        return self.hardware.efficiency.kernel_s

    @cached_property
    def _matmul_flops(self) -> float:
        return self.hardware.peak_flops(self.dtype) * self.hardware.efficiency.matmul

    @cached_property
    def _memory_bytes_per_s(self) -> float:
        return self.hardware.memory_gb_per_s * 1e9 * self.hardware.efficiency.memory

    @cached_property
    def tile_costs(self) -> dict[object, Cost]:
        """Cache of `memo.simulate.layer`: the costs of parts of a layer on one tile."""
        return {}

    def matmul_s(self, m: float, n: float, k: float) -> float:
        """Return the seconds of [m, k] x [k, n]. Small sizes fill the device badly: each size divides the rate by
        (size + half size) / size."""
        half = self.hardware.efficiency.matmul_half_size
        # 2 m n k FLOPs over the product of the three factors.
        return 2.0 * (m + half) * (n + half) * (k + half) / self._matmul_flops + self.kernel_s

    def adding_matmul_s(self, m: float, n: float, k: float) -> float:
        """Return the seconds of a product that is added to a sum in the wide dtype.

        The FLOPs and the traffic of the sum overlap: the longer of both counts, which is the traffic if k is small."""
        return max(self.matmul_s(m, n, k), self.memory_s(2 * m * n * self.wide))

    def sum_s(self, m: float, n: float) -> float:
        """Return the seconds in which a product [m, n], written in the dtype of the model, is added to a wide sum."""
        return self.memory_s(2 * m * n * (self.narrow + self.wide))

    def attention_s(self, flops: float, head_dim: int, backward: bool) -> float:
        """Return the seconds of `flops`, which leave out recomputation: the efficiency of backward accounts for it."""
        efficiency = self.hardware.efficiency
        share = efficiency.attention_backward if backward else efficiency.attention_forward
        half = efficiency.attention_half_head
        share *= head_dim / (head_dim + half) * (_LARGE_HEAD + half) / _LARGE_HEAD
        return flops / (self.hardware.peak_flops(self.dtype) * share) + self.kernel_s

    def memory_s(self, num_bytes: float, num_kernels: float = 1) -> float:
        """Return the seconds of memory-bound kernels that read and write `num_bytes` in all."""
        return num_bytes / self._memory_bytes_per_s + num_kernels * self.kernel_s

    def gather_s(self, num_bytes: float, group: Group) -> float:
        """Return the seconds of an all-gather to, or a reduce-scatter from, `num_bytes` on every rank."""
        if group.size == 1:
            return 0.0
        rate, efficiency = self._collective_bytes_per_s(group), self.hardware.efficiency
        begin_s = efficiency.collective_s + (group.size - 2) * efficiency.hop_s
        return num_bytes * (group.size - 1) / group.size / rate + begin_s

    def all_reduce_s(self, num_bytes: float, group: Group) -> float:
        return 2.0 * self.gather_s(num_bytes, group)

    def all_to_all_s(self, num_bytes: float, group: Group) -> float:
        """Return the seconds of an all-to-all in which every rank sends `num_bytes`, the part for itself included."""
        if group.size == 1:
            return 0.0
        efficiency = self.hardware.efficiency
        members = group.members_per_node(self.hardware.gpus_per_node)
        inside = num_bytes * (members - 1) / group.size / (self.hardware.node_gb_per_s * 1e9 * efficiency.node)
        outside = num_bytes * (group.size - members) / group.size
        outside /= self.hardware.network_gb_per_s * 1e9 * efficiency.network
        return max(inside, outside) + efficiency.collective_s

    def message_s(self, num_bytes: float, group: Group) -> float:
        """Return the seconds of one message to the next rank of the group; the slowest pair counts."""
        if group.size == 1:
            return 0.0
        efficiency = self.hardware.efficiency
        rate = self.hardware.node_gb_per_s * efficiency.node
        if not self._is_in_node(group):
            rate = self.hardware.network_gb_per_s * efficiency.network
        return num_bytes / (rate * 1e9) + efficiency.collective_s

    def _is_in_node(self, group: Group) -> bool:
        return group.members_per_node(self.hardware.gpus_per_node) == group.size

    def _collective_bytes_per_s(self, group: Group) -> float:
        """Return the rate of a ring, which enters and leaves each node once, over the network links of all its members
        there."""
        hardware = self.hardware
        node = hardware.node_gb_per_s * hardware.efficiency.node
        if self._is_in_node(group):
            return node * 1e9
        members = group.members_per_node(hardware.gpus_per_node)
        return min(node, hardware.network_gb_per_s * hardware.efficiency.network * members) * 1e9

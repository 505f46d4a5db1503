"""Host memory for activations and states: one arena of exact size, cut into records of equal size.

torch's pinned allocator rounds each block up to a power of two, which can double what a node needs; an arena
of our own is exact, and pinned by registering it with CUDA.
"""

import mmap
import weakref
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from memo.errors import HostMemoryError
from memo.estimate.host_memory import available_host_bytes
from memo.units import GIB, format_bytes

_SHARE_OF_FREE = 0.9
"""Of free memory, when no limit is set: the rest of the process, and the page cache, still need some."""

_REMEDIES = {
    "activations": "lower --offload-alpha, or use more pipeline stages or nodes",
    "states": "lower --optimizer-offload-fraction, or spread the model over more nodes",
}


def host_budget_bytes(limit_gib: float | None, local_ranks: int) -> int:
    """Host bytes that one of `local_ranks` ranks of this node may use for activations and states.

    `limit_gib` is --offload-host-memory-gb, GiB for the whole node; never more than what is available, and
    nine tenths of that when it is None. Ask on all ranks before any of them makes its pool: pools count as
    used memory.
    """
    available = available_host_bytes()
    node_bytes = available * _SHARE_OF_FREE if limit_gib is None else min(available, limit_gib * GIB)
    return int(node_bytes) // local_ranks


class HostPool:
    """Records of `record_bytes` bytes each, pinned when the device is CUDA.

    Raises HostMemoryError when the arena is larger than `budget_bytes` (see `host_budget_bytes`) or when the
    system refuses to map or to pin it.
    """

    def __init__(
        self,
        num_records: int,
        record_bytes: int,
        device: torch.device,
        budget_bytes: int | None = None,
        contents: Literal["activations", "states"] = "activations",
    ) -> None:
        self.num_records, self.record_bytes, self._remedy = num_records, record_bytes, _REMEDIES[contents]
        if budget_bytes is not None and self.num_bytes > budget_bytes:
            raise HostMemoryError(
                f"{contents} in host memory need {self._needs}, but --offload-host-memory-gb or this node's free"
                f" memory leaves {format_bytes(budget_bytes)} to each rank: raise that flag if it is set,"
                f" {self._remedy}"
            )
        self._arena = self._map()
        self._unpin = _pin(self, self._arena) if device.type == "cuda" and self.num_bytes else None

    @property
    def num_bytes(self) -> int:
        return self.num_records * self.record_bytes

    def record(self, index: int) -> Tensor:
        """uint8 [record_bytes], on the host; IndexError when there is no such record."""
        if not 0 <= index < self.num_records:
            raise IndexError(f"record {index} of {self.num_records}")
        return self._arena[index * self.record_bytes : (index + 1) * self.record_bytes]

    def close(self) -> None:
        """Unpins and lets go of the arena, after all copies; also happens when the pool is dropped."""
        if self._unpin is not None:
            self._unpin()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self.num_records = 0

    @property
    def _needs(self) -> str:
        return f"{format_bytes(self.num_bytes)} = {self.num_records} records x {format_bytes(self.record_bytes)}"

    def _map(self) -> Tensor:
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            memory = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise HostMemoryError(
                f"this system refuses {self._needs} of host memory ({error}), with"
                f" {format_bytes(available_host_bytes())} available: {self._remedy}"
            ) from None
        # Pages that CUDA reads and writes must stay where they are: after a fork the first write would move them away.
        memory.madvise(mmap.MADV_DONTFORK)
        # The first touch decides the NUMA node, and torch would touch from its worker threads: numpy does it here.
        np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
        return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


def _pin(pool: HostPool, arena: Tensor) -> "weakref.finalize[[int], HostPool]":
    """Registers the arena with CUDA; returns what undoes it, at the latest when the pool is dropped."""
    cudart = torch.cuda.cudart()
    status = int(cudart.cudaHostRegister(arena.data_ptr(), arena.numel(), 0))
    if status != 0:
        raise HostMemoryError(
            f"CUDA cannot pin {format_bytes(arena.numel())} of host memory (cudaHostRegister returned {status}):"
            f" raise the limit of locked memory (ulimit -l), {pool._remedy}"
        )
    return weakref.finalize(pool, cudart.cudaHostUnregister, arena.data_ptr())

"""Host memory for activations and states: one arena of exact size, cut into records of equal size.

torch's pinned allocator rounds each block up to a power of two, which can double what a node needs; an arena
of our own is exact, and pinned by registering it with CUDA.
"""

import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from memo.errors import HostMemoryError
from memo.estimate.host_memory import available_host_bytes
from memo.executor.host_budget import REMEDIES, Contents, HostBudget, format_records
from memo.units import format_bytes

_MAP_NORESERVE = 0x4000
"""Of Linux on x86 and ARM; the module mmap has it from Python 3.13 on."""


class HostPool:
    """Records of `record_bytes` bytes each, pinned when the device is CUDA.

    Raises HostMemoryError when the arena is larger than what `budget` has left (None: it may be of any size) or when
    the system refuses to map or to pin it.
    """

    def __init__(
        self,
        num_records: int,
        record_bytes: int,
        device: torch.device,
        budget: HostBudget | None = None,
        contents: Contents = "activations",
    ) -> None:
        self.num_records, self.record_bytes, self._remedy = num_records, record_bytes, REMEDIES[contents]
        if budget is not None:
            budget.draw(contents, record_bytes, num_records)
        is_pinned = device.type == "cuda"
        self._arena = self._map(is_pinned)
        self._unpin = _pin(self, self._arena) if is_pinned and self.num_bytes else None

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

    def _map(self, is_pinned: bool) -> Tensor:
        """Zeros. The thread that touches a page first decides its NUMA node: it is the calling one."""
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            # Pinning takes every page at once, in this thread, so nothing is reserved or touched before.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_pinned else 0)
            memory = mmap.mmap(-1, self.num_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            needs = format_records(self.num_records, self.record_bytes)
            raise HostMemoryError(
                f"this system refuses {needs} of host memory ({error}), with"
                f" {format_bytes(available_host_bytes())} available: {self._remedy}"
            ) from None
        # Pages that CUDA reads and writes must stay where they are: after a fork the first write would move them away.
        memory.madvise(mmap.MADV_DONTFORK)
        if not is_pinned:  # torch would touch from its worker threads, numpy does it here
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
    return weakref.finalize(pool, _unpin, arena.data_ptr())


def _unpin(address: int) -> None:
    """A run does not wait for its last copies, and CUDA does not promise that this call does."""
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(address)

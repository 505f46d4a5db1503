"""Host memory for activations and states: one arena of exact size, cut into records of equal size.

torch's pinned allocator rounds each block up to a power of two, which can double what a node needs; an arena
of our own is exact, and pinned by registering it with CUDA.
"""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

from memo.errors import HostMemoryError
from memo.estimate.host_memory import available_host_bytes
from memo.executor.host_budget import REMEDIES, Contents, HostBudget, format_records
from memo.units import GIB, format_bytes

_MAP_NORESERVE = 0x4000
"""The value on Linux for x86 and ARM; the module mmap has the constant from Python 3.13 on."""


MOST_PINNED_BYTES = 256 * GIB
"""The most that one call pins. Drivers from r580 on refuse 512 GiB and more in one call, though not in several
(NVIDIA/open-gpu-kernel-modules pull 1234, vLLM issue 51080)."""


class HostPool:
    """An arena of records of `record_bytes` bytes each, pinned if the device is CUDA.

    Raises HostMemoryError if the arena is larger than what is left of `budget` (None: no limit), or if the system
    refuses to map or to pin it.
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
        """The record as uint8 [record_bytes], on the host. Raises IndexError if there is no such record."""
        if not 0 <= index < self.num_records:
            raise IndexError(f"record {index} of {self.num_records}")
        return self._arena[index * self.record_bytes : (index + 1) * self.record_bytes]

    def close(self) -> None:
        """Unpin the arena, after its copies, and free it; also done when the pool is garbage-collected."""
        if self._unpin is not None:
            self._unpin()
        self._arena = torch.empty(0, dtype=torch.uint8)
        self.num_records = 0

    def _map(self, is_pinned: bool) -> Tensor:
        """An arena of zeros. The calling thread touches each page first, which decides the page's NUMA node."""
        if self.num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        try:
            # Pinning allocates all pages at once, in this thread, so nothing needs to be reserved or touched before.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if is_pinned else 0)
            memory = mmap.mmap(-1, self.num_bytes, flags=flags)
        except (OSError, OverflowError) as error:
            needs = format_records(self.num_records, self.record_bytes)
            raise HostMemoryError(
                f"this system refuses {needs} of host memory ({error}), with"
                f" {format_bytes(available_host_bytes())} available: {self._remedy}"
            ) from None
        # Pages that CUDA accesses must not be copied: after a fork, the first write to a page would give it a new one.
        memory.madvise(mmap.MADV_DONTFORK)
        if not is_pinned:  # by numpy, because torch would touch them in its worker threads
            np.frombuffer(memory, dtype=np.uint8)[:: mmap.PAGESIZE] = 0
        return torch.frombuffer(memory, dtype=torch.uint8)  # keeps the mapping alive


def _pin(pool: HostPool, arena: Tensor) -> "weakref.finalize[[list[int]], HostPool]":
    """Register the arena with CUDA; returns a finalizer that undoes it, at the latest with the end of the pool.

    Each call pins a range that ends at the end of a record and of a page: a copy must not span two ranges, and two
    ranges must not share a page. A record larger than MOST_PINNED_BYTES is pinned by one call.
    """
    cudart, addresses = torch.cuda.cudart(), list[int]()
    unpin = weakref.finalize(pool, _unpin, addresses)
    least_bytes = math.lcm(pool.record_bytes, mmap.PAGESIZE)
    for part in arena.split(max(1, MOST_PINNED_BYTES // least_bytes) * least_bytes):
        status = int(cudart.cudaHostRegister(part.data_ptr(), part.numel(), 0))
        if status != 0:
            unpin()
            raise HostMemoryError(
                f"CUDA cannot pin {format_bytes(arena.numel())} of host memory (cudaHostRegister returned {status}):"
                f" raise the limit of locked memory (ulimit -l), {pool._remedy}"
            )
        addresses.append(part.data_ptr())
    return unpin


def _unpin(addresses: list[int]) -> None:
    """Synchronizes first: the last copies may still run, and CUDA does not promise that unregistering waits."""
    if addresses:
        torch.cuda.synchronize()
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)

"""The link of the scaled node (benchmarks/scaled_node.py): copies at so many bytes a second."""

import mmap
import time
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor
from ways import HostCopies

from memo.errors import HostMemoryError
from memo.executor.streams import Stream, ThreadStreams

Result = TypeVar("Result")


class PacedStreams(ThreadStreams):
    """A link of so many bytes a second in each direction, for the copies of a plan."""

    def __init__(self, bytes_per_s: float) -> None:
        super().__init__()
        self.bytes_per_s = bytes_per_s

    def copy(self, stream: Stream, dst: Tensor, src: Tensor, dst_name: str, src_name: str) -> None:
        self._issue(stream, lambda: paced(lambda: dst.copy_(src), src.nbytes, self.bytes_per_s))


class PacedCopies(HostCopies):
    """The same link for ways that copy on the stream that computes.

    What waits lies in memory of its own, which torch's allocator, the node's device memory, does not count.
    Raises HostMemoryError where that would be more than `host_bytes`; None: no limit.
    """

    def __init__(self, bytes_per_s: float, host_bytes: int | None = None) -> None:
        super().__init__()
        self.bytes_per_s, self.host_bytes = bytes_per_s, host_bytes
        self._free: defaultdict[int, list[mmap.mmap]] = defaultdict(list)  # by size

    def room_for(self, x: Tensor) -> Tensor:
        if self.host_bytes is not None and self.num_bytes + x.nbytes > self.host_bytes:
            raise HostMemoryError(f"{self.num_bytes + x.nbytes} bytes of host memory are needed, of {self.host_bytes}")
        free = self._free[x.nbytes]
        memory = free.pop() if free else mmap.mmap(-1, x.nbytes)
        room = torch.frombuffer(memory, dtype=x.dtype).view(x.shape)
        weakref.finalize(room, free.append, memory)
        return room

    def take(self, x: Tensor) -> Tensor:
        return paced(lambda: super(PacedCopies, self).take(x), x.nbytes, self.bytes_per_s, spin)

    def bring(self, waiting: Tensor, device: torch.device) -> Tensor:
        return paced(lambda: super(PacedCopies, self).bring(waiting, device), waiting.nbytes, self.bytes_per_s, spin)


def paced(
    copy: Callable[[], Result], num_bytes: int, bytes_per_s: float, wait: Callable[[float], None] = time.sleep
) -> Result:
    begin_s = time.perf_counter()
    result = copy()
    wait(max(0.0, num_bytes / bytes_per_s - (time.perf_counter() - begin_s)))
    return result


def spin(seconds: float) -> None:
    """Wait as the core that computes, which after a sleep would begin with cold caches and a lower clock."""
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        pass

"""Process groups of which only this rank exists: every message ends at once, with what this rank has.

A single device then runs one rank of a larger job: the shapes, the order of operations and the memory are true, and
so is the time that the rank computes; nothing is sent, sums hold one term, and losses mean nothing. What comes in from
nobody (pipeline messages) is zero, so that values stay finite and the optimizer takes its steps.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, Work  # type: ignore[attr-defined]
from torch.futures import Future

_BACKEND = "memo_simulated"


def init_simulated(rank: int, world_size: int) -> None:
    """Start a default process group of `world_size` ranks, of which this process is `rank` and all there is."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _make, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=world_size)


def _make(store: object, rank: int, size: int, timeout: object) -> ProcessGroup:
    return _SimulatedGroup(rank, size)


class _Done(Work):
    """A message that has ended."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def wait(self, timeout: object = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        return self._tensors

    def get_future(self) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        future.set_result(self._tensors)
        return future


class _SimulatedGroup(ProcessGroup):
    """The collectives that memo uses; torch calls some by one name up to 2.12 and by another from 2.13 on.

    torch's stubs overload what its dispatcher calls in one way, so types are told to look away.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one signature of two

    def getBackendName(self) -> str:
        return _BACKEND

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        return _Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        return _Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        for parts, mine in zip(outputs, inputs, strict=True):
            for part in parts:
                part.copy_(mine)
        return _Done([part for parts in outputs for part in parts])

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Work:
        output.view(self.size(), -1).copy_(mine.reshape(1, -1))
        return _Done([output])

    def reduce_scatter_single(self, output: Tensor, blocks: Tensor, opts: Any = None) -> Work:
        output.copy_(blocks.view(self.size(), *output.shape)[self.rank()])
        return _Done([output])

    def all_to_all_single(self, output: Tensor, blocks: Tensor, *splits_and_opts: Any) -> Work:
        output.copy_(blocks)
        return _Done([output])

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return _Done(tensors)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        for tensor in tensors:
            tensor.zero_()
        return _Done(tensors)

    def barrier(self, opts: Any = None) -> Work:
        return _Done([torch.empty(0)])

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

"""Process groups in which only this rank exists: every message ends at once, with this rank's data alone.

A single device then runs one rank of a larger job. The shapes, the order of operations, the memory and the compute time
of the rank are true. But no data are sent, sums have one term, and losses mean nothing. Received pipeline messages are
zeros, so that values stay finite and the optimizer takes its steps.
"""

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, ProcessGroup, Work  # type: ignore[attr-defined]
from torch.futures import Future

_BACKEND = "memo_simulated"


class Link(Protocol):
    """The connection between the ranks of a group, if time is virtual."""

    def message(self, kind: str, num_bytes: int) -> AbstractContextManager[Callable[[], None]]:
        """A context around the stand-in for a message; yields a function that waits for the message's end.

        `num_bytes`: bytes of its larger end.
        """


links: Callable[[Sequence[int]], Link] | None = None
"""Makes the link of a group from its ranks. An emulated GPU that is timed sets it (memo.emulated_gpu.timing)."""


def init_simulated(rank: int, world_size: int) -> None:
    """Start a default process group of `world_size` ranks, in which only this process, `rank`, exists."""
    if _BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(_BACKEND, _make, extended_api=True, devices=["cpu", "cuda"])
    dist.init_process_group(_BACKEND, store=HashStore(), rank=rank, world_size=world_size)


def _make(options: Any, _: object) -> ProcessGroup:
    """Make a group from torch's _DistributedBackendOptions, whose ranks are empty for the group of all ranks."""
    ranks = options.global_ranks_in_group or range(options.group_size)
    return _SimulatedGroup(options.group_rank, options.group_size, None if links is None else links(ranks))


class _Done(Work):
    """A message that has ended."""

    def __init__(self, tensors: list[Tensor], wait: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self._tensors, self._wait = tensors, wait

    def wait(self, timeout: object = None) -> bool:
        self._wait()
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
    """The collectives that memo uses; torch 2.13 renamed some of them, so they have two names here.

    torch's stubs overload methods that its dispatcher calls with one signature; hence the ignored types.
    """

    def __init__(self, rank: int, size: int, link: Link | None) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub knows one signature of two
        self._link = link

    def getBackendName(self) -> str:
        return _BACKEND

    def _get_backend(self, device: torch.device) -> Any:
        """From 2.14 on, torch calls this before it sends a batch of messages. The group is its own backend."""
        return self

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        with self._message("all_reduce", *tensors) as wait:
            return _Done(tensors, wait)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        with self._message("gather", *tensors) as wait:
            return _Done(tensors, wait)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Work:  # type: ignore[override]
        with self._message("gather", *(part for parts in outputs for part in parts)) as wait:
            for parts, mine in zip(outputs, inputs, strict=True):
                for part in parts:
                    part.copy_(mine)
            return _Done([part for parts in outputs for part in parts], wait)

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> Work:
        with self._message("gather", output) as wait:
            output.view(self.size(), -1).copy_(mine.reshape(1, -1))
            return _Done([output], wait)

    def reduce_scatter_single(self, output: Tensor, blocks: Tensor, opts: Any = None) -> Work:
        with self._message("gather", blocks) as wait:
            output.copy_(blocks.view(self.size(), *output.shape)[self.rank()])
            return _Done([output], wait)

    def all_to_all_single(self, output: Tensor, blocks: Tensor, *splits_and_opts: Any) -> Work:
        with self._message("all_to_all", blocks) as wait:
            output.copy_(blocks)
            return _Done([output], wait)

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        return _Done(tensors)  # no rank waits for its end: the receiver's side takes the message's time

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> Work:
        with self._message("message", *tensors) as wait:
            for tensor in tensors:
                tensor.zero_()
            return _Done(tensors, wait)

    def barrier(self, opts: Any = None) -> Work:
        return _Done([torch.empty(0)])

    def _message(self, kind: str, *tensors: Tensor) -> AbstractContextManager[Callable[[], None]]:
        """A context around the stand-in for a message with these tensors at its larger end (see Link.message)."""
        if self._link is None or not tensors[0].is_cuda:
            return contextlib.nullcontext(lambda: None)
        return self._link.message(kind, sum(tensor.nbytes for tensor in tensors))

    _allgather_base = all_gather_single  # type: ignore[assignment]
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

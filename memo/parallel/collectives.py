"""Collectives and messages on tensors, without autograd; all axes of the mesh use them.

Every function takes the process group as an argument, and returns its input unchanged when the group is None or has
one rank, so callers need no special case. Blocks always lie along dim 0 and have the same size on all ranks. memo
issues all its messages here, so a listener of a group (memo.mesh.group) is notified of each.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, Work

from memo.mesh.group import begin_message, settling, torch_group, watched

# torch 2.13 renamed these two and warns about the old names; 2.11 knows only the old ones.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_ADDED_AT_ONCE = 1 << 20
_REDUCE_OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN}


def group_size(group: ProcessGroup | None) -> int:
    """Number of ranks in the group; 1 for None."""
    return 1 if group is None else group.size()


def group_rank(group: ProcessGroup | None) -> int:
    """This process's rank within the group; 0 for None."""
    return 0 if group is None else group.rank()


def all_gather(x: Tensor, group: ProcessGroup | None, out: Tensor | None = None) -> Tensor:
    """Concatenate every rank's ``x`` [n0, ...] along dim 0 -> [size * n0, ...], into ``out`` if given."""
    return _wait(all_gather_async(x, group, out))


def all_gather_async(x: Tensor, group: ProcessGroup | None, out: Tensor | None = None) -> tuple[Tensor, Work | None]:
    """Start an all_gather; the returned tensor is valid after ``work.wait()``.

    The work is None if there is nothing to wait for.
    """
    if group is None or group.size() == 1:
        return _passed_through(x, out), None
    if out is None:
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
    span = begin_message(group, "all_gather", out)
    return out, watched(_all_gather_single(out, x.contiguous(), group=torch_group(group), async_op=True), span)


def reduce_scatter(x: Tensor, group: ProcessGroup | None, out: Tensor | None = None) -> Tensor:
    """Sum ``x`` [size * n0, ...] over the ranks and return this rank's block [n0, ...], in ``out`` if given."""
    return _wait(reduce_scatter_async(x, group, out))


def reduce_scatter_async(
    x: Tensor, group: ProcessGroup | None, out: Tensor | None = None
) -> tuple[Tensor, Work | None]:
    """Start a reduce_scatter; the results are as those of all_gather_async."""
    if group is None or group.size() == 1:
        return _passed_through(x, out), None
    _require_blocks(x, group.size(), "reduce_scatter")
    if out is None:
        out = x.new_empty((x.shape[0] // group.size(), *x.shape[1:]))
    span = begin_message(group, "reduce_scatter", x)
    return out, watched(_reduce_scatter_single(out, x.contiguous(), group=torch_group(group), async_op=True), span)


def all_reduce(x: Tensor, group: ProcessGroup | None, op: str = "sum") -> Tensor:
    """Reduce ``x`` over the group in place and return it; ``op`` is "sum", "max" or "min"."""
    if op not in _REDUCE_OPS:
        raise ValueError(f"all_reduce op is {op!r}; known are {', '.join(_REDUCE_OPS)}")
    if group is not None and group.size() > 1:
        with _blocking(group, "all_reduce", x):
            dist.all_reduce(x, op=_REDUCE_OPS[op], group=torch_group(group))
    return x


def add_up(tensors: Sequence[Tensor], group: ProcessGroup | None) -> None:
    """Sum contiguous tensors of one dtype over the group, each in place, with one message for each `_ADDED_AT_ONCE`
    elements, whose parts of all ranks take memory.

    Every rank gathers the tensors of all ranks and adds them in the order of the ranks. In an all-reduce the order of
    the additions depends on where in the message an element lies, so the last bit of a sum would depend on which other
    tensors are in the message.
    """
    if not tensors or group_size(group) == 1:
        return
    pieces = [piece for tensor in tensors for piece in tensor.view(-1).split(_ADDED_AT_ONCE)]
    while pieces:
        ends = [end for end in accumulate(len(piece) for piece in pieces) if end <= _ADDED_AT_ONCE]
        now, pieces = pieces[: len(ends)], pieces[len(ends) :]
        parts = all_gather(torch.cat(now), group).chunk(group_size(group))
        for part in parts[1:]:
            parts[0].add_(part)
        for piece, total in zip(now, parts[0].split([len(piece) for piece in now]), strict=True):
            piece.copy_(total)


def all_to_all(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """Send block i of ``x`` [size * n0, ...] to rank i; block i of the result is what rank i sent here."""
    if group is None or group.size() == 1:
        return x
    _require_blocks(x, group.size(), "all_to_all")
    x = x.contiguous()
    out = torch.empty_like(x)
    with _blocking(group, "all_to_all", x):
        dist.all_to_all_single(out, x, group=torch_group(group))
    return out


def exchange(
    sends: Sequence[tuple[Tensor, int]], receives: Sequence[tuple[Tensor, int]], group: ProcessGroup
) -> list[Work]:
    """Start point-to-point transfers as one batch; no tensor may be read or written before every work is waited for.

    Each entry is (contiguous tensor, peer's rank within the group). Messages between two ranks are matched in the
    order given and never by tag, because NCCL ignores tags. NCCL can also deadlock if transfers in both directions are
    not batched.
    """
    within = torch_group(group)
    operations = [dist.P2POp(dist.isend, x, group=within, group_peer=peer) for x, peer in sends]
    operations += [dist.P2POp(dist.irecv, x, group=within, group_peer=peer) for x, peer in receives]
    if not operations:
        return []
    span = begin_message(group, "exchange", operations[0].tensor)
    works = dist.batch_isend_irecv(operations)
    tensors = [operation.tensor for operation in operations]
    ended = [tensors] if len(works) == 1 else [[tensor] for tensor in tensors]  # NCCL has one work for the whole batch
    return [watched(settling(work, group, its), span) for work, its in zip(works, ended, strict=True)]


class Shift:
    """A message round a ring: sends a tensor `places` ranks ahead, and receives one from `places` ranks behind.

    `received`: the memory for what comes, which may be used after `wait`.
    """

    def __init__(self, x: Tensor, group: ProcessGroup | None, places: int) -> None:
        assert group is not None
        rank, size = group_rank(group), group_size(group)
        self._sent: Tensor | None = x  # its memory must not be freed before the transfer has ended
        self.received = torch.empty_like(x)
        self._works = exchange([(x, (rank + places) % size)], [(self.received, (rank - places) % size)], group)

    def wait(self) -> Tensor:
        """Make the compute stream wait for the message; further calls do nothing."""
        for work in self._works:
            work.wait()
        self._sent, self._works = None, []  # a work may keep what it sends alive
        return self.received


def send(x: Tensor, group: ProcessGroup, peer: int) -> Work:
    """Start sending a contiguous tensor to a rank of the group; do not write to it before the work is waited for."""
    span = begin_message(group, "send", x)
    work = dist.isend(x, group=torch_group(group), group_dst=peer)
    assert work is not None, "this rank is of the group"
    return watched(settling(work, group, [x]), span)


def receive(x: Tensor, group: ProcessGroup, peer: int) -> Work:
    """Start filling a contiguous tensor from a rank of the group; it is valid after `wait()`."""
    span = begin_message(group, "receive", x)
    work = dist.irecv(x, group=torch_group(group), group_src=peer)
    assert work is not None, "this rank is of the group"
    return watched(settling(work, group, [x]), span)


@contextlib.contextmanager
def _blocking(group: ProcessGroup, name: str, x: Tensor) -> Iterator[None]:
    span = begin_message(group, name, x)
    if span is not None:
        span.waits()
    yield
    if span is not None:
        span.end()


def _wait(pending: tuple[Tensor, Work | None]) -> Tensor:
    x, work = pending
    if work is not None:
        work.wait()
    return x


def _passed_through(x: Tensor, out: Tensor | None) -> Tensor:
    return x if out is None else out.copy_(x)


def _require_blocks(x: Tensor, size: int, name: str) -> None:
    if x.shape[0] % size:
        raise ValueError(
            f"{name} needs dim 0 in equal blocks: it is {x.shape[0]}, the group has {size} ranks; "
            f"pad dim 0 to a multiple of {size}"
        )

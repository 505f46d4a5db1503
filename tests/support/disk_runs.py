"""Puts records of activations on a disk although host memory would hold them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from unittest.mock import patch

from memo.executor.disk_budget import DiskBudget
from memo.spec.disk import Disk, RecordKind, Split
from memo.train import swap


@contextmanager
def shared(share: float) -> Iterator[None]:
    """Let runs that are built inside keep this share of the records of each kind on disk, as if host memory were full.

    The disk is not measured: its rate decides nothing if alpha is a number.
    """

    def split(kinds: Sequence[RecordKind], host_bytes: int) -> Split:
        return Split(tuple(ceil(share * kind.number) for kind in kinds), 0, 0)

    def measured(budget: DiskBudget) -> Disk:
        return Disk(budget.left_bytes, 1e9, 1e9)

    with patch.object(swap, "split_records", split), patch.object(swap, "measured_disk", measured):
        yield

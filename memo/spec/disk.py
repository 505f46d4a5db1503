"""Host records on a disk: the size of their file, and the host memory through which they pass.

A record leaves the device for a staging buffer in pinned host memory, and is written to the disk from there; on the way
back it is read into a staging buffer. So host memory holds a record on disk only while it passes through a staging
buffer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from memo.units import GIB

BLOCK_BYTES = 4096
"""Transfers that bypass the page cache have offsets, lengths and addresses that are multiples of a disk's block; no
disk has larger blocks."""

DISK_FITS_SHARE = 0.9
"""Share of a disk's free space that a run takes by default: other programs write there as well."""

NUM_BUFFERS = 4
"""Staging buffers for the records of a swap plan: two for the disk, and one for the copies of each direction."""


def disk_budget_bytes(free_bytes: float, limit_gib: float | None) -> int:
    """Bytes of a disk that all ranks of a node may take; `limit_gib`: --offload-nvme-gib."""
    return int(free_bytes * DISK_FITS_SHARE if limit_gib is None else min(free_bytes, limit_gib * GIB))


def stride_bytes(record_bytes: int) -> int:
    """Bytes from one record to the next, in the file and in the staging buffers."""
    return -(-record_bytes // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(frozen=True)
class Disk:
    """The part of a disk that one rank has for records that do not fit in host memory: bytes, bytes per second.

    `is_direct`: whether transfers bypass the page cache, which not every file system allows.
    """

    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    is_direct: bool = True


class RecordKind(NamedTuple):
    """The host records of one swap plan, or of `parts` equal plans, each of which moves one part of each record.

    Attributes:
        number: how many records there are.
        num_bytes: bytes of one record with all its parts.
        num_buffers: staging buffers, each for one part of a record, if any record of the plan is on disk.
        parts: equal parts of a record, each of which has a place of its own in the file.
    """

    number: int
    num_bytes: int
    num_buffers: int = NUM_BUFFERS
    parts: int = 1

    @property
    def total_bytes(self) -> int:
        return self.number * self.num_bytes

    @property
    def stride_bytes(self) -> int:
        """Bytes of one record on disk."""
        return self.parts * stride_bytes(self.num_bytes // self.parts)

    @property
    def staging_bytes(self) -> int:
        return self.buffers_of(self.number) * stride_bytes(self.num_bytes // self.parts)

    def buffers_of(self, num_on_disk: int) -> int:
        """Staging buffers for `num_on_disk` records on disk."""
        return min(self.num_buffers, self.parts * num_on_disk)


NO_RECORDS = RecordKind(0, 0)


class Split(NamedTuple):
    """Numbers of records of each kind that are on disk, and the bytes of all kinds in host memory and on disk."""

    on_disk: tuple[int, ...]
    host_bytes: int
    disk_bytes: int


def split_records(kinds: Sequence[RecordKind], host_bytes: int) -> Split | None:
    """Leave as many records in host memory as `host_bytes` hold. None where it does not even hold the staging buffers.

    Kinds go to the disk from the last to the first: no record of a kind does before all records of the kinds behind it.
    """
    on_disk = [0] * len(kinds)
    taken_bytes = sum(kind.total_bytes for kind in kinds)
    for index in reversed(range(len(kinds))):
        kind = kinds[index]
        if taken_bytes <= host_bytes:
            break
        if not kind.total_bytes:
            continue
        taken_bytes += kind.staging_bytes
        on_disk[index] = min(kind.number, max(1, -(-(taken_bytes - host_bytes) // kind.num_bytes)))
        taken_bytes -= on_disk[index] * kind.num_bytes
    if taken_bytes > host_bytes:
        return None
    disk_bytes = sum(count * kind.stride_bytes for count, kind in zip(on_disk, kinds, strict=True))
    return Split(tuple(on_disk), taken_bytes, disk_bytes)


def least_host_bytes(kinds: Sequence[RecordKind], disk_bytes: float = inf) -> int:
    """The least host memory that suffices where a disk of `disk_bytes` takes all that it can, the last kind first."""
    taken_bytes = sum(kind.total_bytes for kind in kinds)
    for kind in reversed(kinds):
        if not kind.total_bytes:
            continue
        count = int(min(kind.number, disk_bytes // kind.stride_bytes))
        saved_bytes = count * kind.num_bytes - kind.staging_bytes
        if saved_bytes <= 0:
            break
        taken_bytes -= saved_bytes
        disk_bytes -= count * kind.stride_bytes
        if count < kind.number:
            break
    return taken_bytes

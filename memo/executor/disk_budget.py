"""The share of the disk of --offload-nvme-path that one rank may use."""

import os

from memo.errors import DiskError
from memo.executor.record_file import RecordFile, open_nameless
from memo.spec.disk import stride_bytes
from memo.units import format_bytes


def disk_free_bytes(directory: str) -> int:
    """Bytes that this process may still write to the directory. Raises DiskError if it cannot hold records."""
    os.close(open_nameless(directory))
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


class DiskBudget:
    """The bytes of disk that are granted to one rank; each file takes its part of them."""

    def __init__(self, directory: str, granted_bytes: int) -> None:
        self.directory, self.granted_bytes, self.drawn_bytes = directory, granted_bytes, 0

    @property
    def left_bytes(self) -> int:
        return self.granted_bytes - self.drawn_bytes

    def file(self, num_records: int, record_bytes: int) -> RecordFile:
        """Open a file for these records. Raises DiskError if they exceed the bytes left, or the room on the disk."""
        needed_bytes = num_records * stride_bytes(record_bytes)
        if needed_bytes > self.left_bytes:
            raise DiskError(
                f"--offload-nvme-path {self.directory}: activations need {format_bytes(needed_bytes)} there, but this "
                f"rank may take {format_bytes(self.left_bytes)}: free some, raise --offload-nvme-gib, lower "
                "--offload-alpha, or use more pipeline stages or nodes"
            )
        self.drawn_bytes += needed_bytes
        return RecordFile(self.directory, num_records, record_bytes)

"""What a rank may take of the disk of --offload-nvme-path."""

import os

from memo.errors import DiskError
from memo.executor.record_file import RecordFile, open_nameless
from memo.spec.disk import stride_bytes
from memo.units import format_bytes


def disk_free_bytes(directory: str) -> int:
    """What this process may still write there. Raises DiskError for a directory that cannot hold records."""
    os.close(open_nameless(directory))
    system = os.statvfs(directory)
    return system.f_bavail * system.f_frsize


class DiskBudget:
    """The part of one rank, of which files are opened until nothing is left."""

    def __init__(self, directory: str, granted_bytes: int) -> None:
        self.directory, self.granted_bytes, self.drawn_bytes = directory, granted_bytes, 0

    @property
    def left_bytes(self) -> int:
        return self.granted_bytes - self.drawn_bytes

    def file(self, num_records: int, record_bytes: int) -> RecordFile:
        """A file for as many records. Raises DiskError where they exceed what is left, or what the disk has."""
        needed_bytes = num_records * stride_bytes(record_bytes)
        if needed_bytes > self.left_bytes:
            raise DiskError(
                f"--offload-nvme-path {self.directory}: activations need {format_bytes(needed_bytes)} there, but this "
                f"rank may take {format_bytes(self.left_bytes)}: free some, raise --offload-nvme-gib, lower "
                "--offload-alpha, or use more pipeline stages or nodes"
            )
        self.drawn_bytes += needed_bytes
        return RecordFile(self.directory, num_records, record_bytes)

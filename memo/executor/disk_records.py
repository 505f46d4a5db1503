"""The memory and the file of the records of one kind that lie on a disk, of which each swapper gets its part."""

import torch

from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.record_file import RecordFile
from memo.executor.staging import Staging
from memo.planner.disk_plan import DiskPlan


class DiskRecords:
    """A file of records, and staging buffers in pinned host memory.

    Args:
        plan: of each of `parts` swappers.
        host: the budget that has the disk, from which both are taken.

    Raises HostMemoryError or DiskError where the budget does not hold them.
    """

    def __init__(
        self, plan: DiskPlan, record_bytes: int, device: torch.device, host: HostBudget | None, parts: int = 1
    ) -> None:
        assert host is not None and host.disk is not None, "a disk plan without a disk"
        self.plan = plan
        self.file: RecordFile = host.disk.file(parts * len(plan.records), record_bytes)
        self.buffers = HostPool(parts * plan.num_buffers, self.file.stride_bytes, device, host)

    def staging(self, part: int = 0, name: str = "") -> Staging:
        """Of the swapper with this number; `name` begins the names of its buffers and records."""
        first = part * self.plan.num_buffers
        buffers = [self.buffers.record(first + index) for index in range(self.plan.num_buffers)]
        return Staging(self.plan, buffers, self.file, part * len(self.plan.records), name)


def host_bytes(pool: HostPool, disk: DiskRecords | None) -> int:
    """Of the records in memory, and of the staging buffers of those on disk."""
    return pool.num_bytes + (0 if disk is None else disk.buffers.num_bytes)


def disk_bytes(disk: DiskRecords | None) -> int:
    return 0 if disk is None else disk.file.num_bytes

"""The memory and the file of the records of one kind that lie on a disk."""

import torch

from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.record_file import RecordFile
from memo.executor.staging import Staging
from memo.planner.disk_plan import DiskPlan


class DiskRecords:
    """A file of records, and staging buffers in pinned host memory.

    Args:
        part_bytes: of one of plan.parts equal parts of a record.
        host: the budget that has the disk, from which both are taken.
        name: begins the names of buffers and records, for the checker of races.

    Raises HostMemoryError or DiskError where the budget does not hold them.
    """

    def __init__(
        self, plan: DiskPlan, part_bytes: int, device: torch.device, host: HostBudget | None, name: str = ""
    ) -> None:
        assert host is not None and host.disk is not None, "a disk plan without a disk"
        self.plan = plan
        self.file: RecordFile = host.disk.file(plan.parts * len(plan.records), part_bytes)
        self.buffers = HostPool(plan.num_buffers, self.file.stride_bytes, device, host)
        buffers = [self.buffers.record(index) for index in range(plan.num_buffers)]
        self.staging = Staging(plan, buffers, self.file, name)


def host_bytes(pool: HostPool, disk: DiskRecords | None) -> int:
    """Of the records in memory, and of the staging buffers of those on disk."""
    return pool.num_bytes + (0 if disk is None else disk.buffers.num_bytes)


def disk_bytes(disk: DiskRecords | None) -> int:
    return 0 if disk is None else disk.file.num_bytes

"""The records of a swap plan: in one arena of host memory, or in a file if a disk plan names them."""

import torch
from torch import Tensor

from memo.executor.host_budget import HostBudget
from memo.executor.host_pool import HostPool
from memo.executor.record_file import RecordFile
from memo.executor.staging import Staging
from memo.executor.streams import StreamBackend
from memo.planner.disk_plan import DiskPlan
from memo.planner.swap import SwapPlan


class HostRecords:
    """The records of one plan, each in `parts` equal parts; each swapper that follows the plan moves one part.

    Args:
        part_bytes: bytes of one part of a record.
        host: the budget from which memory and disk are taken; None: no limit, and no disk.
        disk: says which records are on a disk; None: all are in memory.
        name: prefix of the names of staging buffers and of records on disk, for the race checker.

    Raises HostMemoryError or DiskError if the budget is too small for them.

    Attributes:
        staging: moves the records that are on disk; None: all are in memory.
    """

    def __init__(
        self,
        plan: SwapPlan,
        part_bytes: int,
        device: torch.device,
        backend: StreamBackend,
        host: HostBudget | None = None,
        disk: DiskPlan | None = None,
        name: str = "",
        parts: int = 1,
    ) -> None:
        on_disk = () if disk is None else disk.place_of
        in_memory = [record for record in range(plan.num_records) if record not in on_disk]
        self.num_records, self.part_bytes = plan.num_records, part_bytes
        self._place_of = {record: place for place, record in enumerate(in_memory)}
        self.pool = HostPool(parts * len(in_memory), part_bytes, device, host)
        self.file: RecordFile | None = None
        self.staging: Staging | None = None
        self._staged: HostPool | None = None
        if disk is not None:
            assert host is not None and host.disk is not None, "a disk plan without a disk"
            self.file = host.disk.file(parts * len(disk.records), part_bytes)
            self._staged = HostPool(disk.num_buffers, self.file.stride_bytes, device, host)
            buffers = [self._staged.record(index) for index in range(disk.num_buffers)]
            self.staging = Staging(plan.steps, disk, buffers, self.file, backend, name)

    @property
    def host_bytes(self) -> int:
        """Bytes of the records in memory, and of the staging buffers for records on disk."""
        return self.pool.num_bytes + (0 if self._staged is None else self._staged.num_bytes)

    @property
    def disk_bytes(self) -> int:
        return 0 if self.file is None else self.file.num_bytes

    def record(self, number: int, part: int) -> Tensor:
        """Return a part of a record that is in memory, uint8 [part_bytes]."""
        return self.pool.record(part * len(self._place_of) + self._place_of[number])

    def buffers(self, part: int) -> list[Tensor]:
        """Return all host memory that the swapper of a part copies to or from: staging buffers and records."""
        staged = [] if self.staging is None else self.staging.buffers
        return [*staged, *(self.record(number, part) for number in self._place_of)]

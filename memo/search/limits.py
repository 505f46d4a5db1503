"""How much memory a run may surely take."""

from dataclasses import dataclass
from math import inf

from memo.estimate.calibration import FITS_SHARE, USABLE_SHARE
from memo.estimate.host_memory import node_budget_bytes
from memo.search.question import Question


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that one rank may take of its device, and that all `local_ranks` ranks of a node may take of host
    memory, and of the disk of a run that names one.
    """

    device_bytes: float
    host_bytes: float
    local_ranks: int
    disk_bytes: float = inf

    @property
    def disk_bytes_of_rank(self) -> float | None:
        return None if self.disk_bytes == inf else self.disk_bytes / self.local_ranks

    @property
    def disk_bytes_of_node(self) -> float | None:
        return None if self.disk_bytes == inf else self.disk_bytes


def limits_of(question: Question) -> MemoryLimits:
    """What surely fits on the machines of a question."""
    return MemoryLimits(
        FITS_SHARE * USABLE_SHARE * question.capacity.gpu_bytes,
        node_budget_bytes(question.capacity.host_bytes, None),
        min(question.gpus, question.hardware.gpus_per_node),
        question.hardware.nvme_budget_bytes or inf,
    )

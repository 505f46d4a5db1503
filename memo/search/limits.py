"""How much memory a run may surely take."""

from dataclasses import dataclass
from math import inf

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


def limits_of(question: Question) -> MemoryLimits:
    """What surely fits on the machines of a question."""
    return MemoryLimits(
        question.capacity.sure_gpu_bytes,
        question.capacity.sure_host_bytes,
        question.hardware.local_ranks(question.gpus),
        question.hardware.nvme_budget_bytes or inf,
    )

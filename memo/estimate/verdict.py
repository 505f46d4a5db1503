"""Whether a run fits, as one of four words, from the bytes that it needs and the bytes that there are.

    device     fits <= 98 % of the usable memory, oom > 100.3 %, unsure between (memo.estimate.calibration)
    host       fits <= 90 % of a node's memory, oohm > 100 %, unsure between

Known error on the 232 measured runs of the calibration: no verdict is wrong, and 7 runs that did fit are unsure.
"""

from dataclasses import dataclass
from enum import StrEnum
from math import inf

from memo.estimate.calibration import FITS_SHARE, OOM_SHARE, USABLE_SHARE
from memo.estimate.host_memory import HOST_FITS_SHARE, node_budget_bytes


class Verdict(StrEnum):
    """oom: out of GPU memory; oohm: the GPU would suffice, but host memory runs out."""

    FITS = "fits"
    UNSURE = "unsure"
    OOM = "oom"
    OOHM = "oohm"


@dataclass(frozen=True)
class Capacity:
    """Bytes of memory that there are: nominal memory of one GPU, and host memory of one node."""

    gpu_bytes: float
    host_bytes: float

    @property
    def sure_gpu_bytes(self) -> float:
        """Up to which a run is judged to fit."""
        return FITS_SHARE * USABLE_SHARE * self.gpu_bytes

    @property
    def sure_host_bytes(self) -> int:
        return node_budget_bytes(self.host_bytes, None)


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes that one rank may take of its device, and that all `local_ranks` ranks of a node may take of host
    memory, and of the disk of a run that names one.
    """

    device_bytes: float
    host_bytes: float
    local_ranks: int
    disk_bytes: float = inf


def judge(gpu_bytes: float, host_bytes: float, capacity: Capacity) -> Verdict:
    """The calibrated verdict on one rank's peak and on one node's host memory; if both fail, the verdict is oom."""
    device = _between(gpu_bytes / (USABLE_SHARE * capacity.gpu_bytes), FITS_SHARE, OOM_SHARE, Verdict.OOM)
    host = _between(host_bytes / capacity.host_bytes, HOST_FITS_SHARE, 1.0, Verdict.OOHM)
    for verdict in (Verdict.OOM, Verdict.OOHM, Verdict.UNSURE):
        if verdict in (device, host):
            return verdict
    return Verdict.FITS


def judge_capacity(gpu_bytes: float, capacity: Capacity) -> Verdict:
    """The verdict of an exact account: everything up to the capacity fits."""
    return Verdict.FITS if gpu_bytes <= capacity.gpu_bytes else Verdict.OOM


def _between(share: float, fits: float, fails: float, failure: Verdict) -> Verdict:
    if share <= fits:
        return Verdict.FITS
    return failure if share > fails else Verdict.UNSURE

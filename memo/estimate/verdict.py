"""Does it fit? From bytes needed and bytes there to one of four words, with the bound that each rests on.

    device     fits <= 98 % of the usable memory, oom > 100.3 %, unsure between (memo.estimate.calibration)
    host       fits <= 90 % of a node's memory, oohm > 100 %, unsure between

Known error, on the 232 measured runs that it was calibrated on: none is called wrong, 7 are unsure (and ran).
"""

from dataclasses import dataclass
from enum import StrEnum

from memo.estimate.calibration import FITS_SHARE, OOM_SHARE, USABLE_SHARE
from memo.estimate.host_memory import HOST_FITS_SHARE


class Verdict(StrEnum):
    """oohm: the GPU would do, but host memory runs out."""

    FITS = "fits"
    UNSURE = "unsure"
    OOM = "oom"
    OOHM = "oohm"


@dataclass(frozen=True)
class Capacity:
    """What there is, in bytes: nominal memory of one GPU, and host memory of one node."""

    gpu_bytes: float
    host_bytes: float


def judge(gpu_bytes: float, host_bytes: float, capacity: Capacity) -> Verdict:
    """The calibrated verdict on one rank's peak and one node's host memory.

    Out of device memory comes before out of host memory, and both before unsure.
    """
    device = _between(gpu_bytes / (USABLE_SHARE * capacity.gpu_bytes), FITS_SHARE, OOM_SHARE, Verdict.OOM)
    host = _between(host_bytes / capacity.host_bytes, HOST_FITS_SHARE, 1.0, Verdict.OOHM)
    for verdict in (Verdict.OOM, Verdict.OOHM, Verdict.UNSURE):
        if verdict in (device, host):
            return verdict
    return Verdict.FITS


def judge_capacity(gpu_bytes: float, capacity: Capacity) -> Verdict:
    """Fits exactly up to the capacity."""
    return Verdict.FITS if gpu_bytes <= capacity.gpu_bytes else Verdict.OOM


def _between(share: float, fits: float, fails: float, failure: Verdict) -> Verdict:
    if share <= fits:
        return Verdict.FITS
    return failure if share > fails else Verdict.UNSURE

"""Whether a run fits, as one of four words, from the bytes that it needs and the bytes that are available.

    Megatron-LM's account    fits <= 98 % of the usable memory, oom > 100.3 %, unsure between; see
                             memo.estimate.calibration
    memo's account           fits <= memory that torch reports, less its allocator's loss to whole pages and the error
                             of the count (memo.estimate.memory_errors); oom if it would not even fit with the least
                             memory that torch does not see and the error in its favour; unsure between
    host                     fits <= 90 % of a node's memory, oohm > 100 %, unsure between

Known error: of Megatron-LM's account on the 232 measured runs of the calibration: no verdict is wrong, and 7 runs that
did fit are unsure. Verdicts of memo's account were not tested on a GPU: the count was compared with the emulated GPU,
and memory that torch does not see is taken from published figures, which differ. So a run that fits may be `tight`.
"""

from enum import StrEnum
from math import inf
from typing import Literal, NamedTuple

from memo.estimate.calibration import FITS_SHARE, OOM_SHARE, USABLE_SHARE
from memo.estimate.hardware import visible_gib
from memo.estimate.host_memory import HOST_FITS_SHARE, node_budget_bytes
from memo.estimate.memory_account import LOST_PAGES_BYTES
from memo.estimate.memory_errors import FULL_SIZE
from memo.estimate.unseen_memory import FAST_NODE, NOTHING, Links, Unseen
from memo.units import GIB

Program = Literal["memo", "megatron-lm"]

TIGHT_BYTES = GIB
"""A tight run is out of memory if it takes this much more unseen memory than foreseen, or as much as published figures
allow if that is more. Only the GPU's memory can be tight: of a node's host memory a tenth stays free in every run that
fits."""


class Verdict(StrEnum):
    """oom: out of GPU memory; oohm: the GPU would suffice, but host memory runs out."""

    FITS = "fits"
    UNSURE = "unsure"
    OOM = "oom"
    OOHM = "oohm"


class Capacity(NamedTuple):
    """Bytes of memory that are available, and how an account is compared with them.

    Attributes:
        gpu_bytes: memory of one GPU, as its driver reports it.
        host_bytes: host memory of one node.
        program: the program whose account is judged.
    """

    gpu_bytes: float
    host_bytes: float
    program: Program = "memo"

    @property
    def usable_gpu_bytes(self) -> float:
        """Bytes that torch reports."""
        if self.program == "megatron-lm":
            return USABLE_SHARE * self.gpu_bytes
        return GIB * visible_gib(self.gpu_bytes / GIB)

    @property
    def sure_gpu_bytes(self) -> float:
        """Bytes up to which a run is judged to fit."""
        if self.program == "megatron-lm":
            return FITS_SHARE * self.usable_gpu_bytes
        return sure_bytes(self.usable_gpu_bytes)

    @property
    def most_gpu_bytes(self) -> float:
        """Bytes above which a run is judged to be out of memory."""
        if self.program == "megatron-lm":
            return OOM_SHARE * self.usable_gpu_bytes
        return self.usable_gpu_bytes / (1.0 - FULL_SIZE.share)

    @property
    def sure_host_bytes(self) -> int:
        return node_budget_bytes(self.host_bytes, None)

    def is_tight(self, gpu_bytes: float, unseen: Unseen) -> bool:
        """Whether a run that fits would not fit if it took more unseen memory than is foreseen."""
        if self.program == "megatron-lm":
            return False
        return gpu_bytes <= self.sure_gpu_bytes < gpu_bytes + room_for_unseen(unseen)


class MemoryLimits(NamedTuple):
    """Bytes that one rank may take of its device, and that all `local_ranks` ranks of a node may take of host memory,
    and of the disk if the run names one; `links`: links between the GPUs."""

    device_bytes: float
    host_bytes: float
    local_ranks: int
    disk_bytes: float = inf
    links: Links = FAST_NODE


def sure_bytes(usable_bytes: float) -> float:
    """The largest result of memo's account with which a run fits surely, where torch reports `usable_bytes`."""
    return max(0.0, usable_bytes - LOST_PAGES_BYTES) / (1.0 + FULL_SIZE.share)


def room_for_unseen(unseen: Unseen) -> int:
    """Bytes of a GPU that stay free in a run that is not tight."""
    return max(TIGHT_BYTES, unseen.above)


def judge(gpu_bytes: float, host_bytes: float, capacity: Capacity, unseen: Unseen = NOTHING) -> Verdict:
    """The verdict on one rank's peak and on one node's host memory; if both fail, the verdict is oom.

    `unseen`: the part of `gpu_bytes` that is known within a range alone.
    """
    device = Verdict.FITS
    if gpu_bytes > capacity.sure_gpu_bytes:
        device = Verdict.OOM if gpu_bytes - unseen.below > capacity.most_gpu_bytes else Verdict.UNSURE
    host = Verdict.FITS
    if host_bytes > HOST_FITS_SHARE * capacity.host_bytes:
        host = Verdict.OOHM if host_bytes > capacity.host_bytes else Verdict.UNSURE
    for verdict in (Verdict.OOM, Verdict.OOHM, Verdict.UNSURE):
        if verdict in (device, host):
            return verdict
    return Verdict.FITS


def judge_capacity(gpu_bytes: float, capacity: Capacity) -> Verdict:
    """The verdict of an exact account: everything up to the capacity fits."""
    return Verdict.FITS if gpu_bytes <= capacity.gpu_bytes else Verdict.OOM

"""GPUs with just enough memory for a given number of bytes to fit surely."""

from memo.estimate.hardware import DRIVER_GIB, DRIVER_SHARE
from memo.estimate.memory_account import LOST_PAGES_BYTES
from memo.estimate.memory_errors import FULL_SIZE
from memo.units import GIB


def gpu_bytes_for(sure_bytes: float) -> float:
    """Return the memory, as the driver reports it, of a GPU on which exactly `sure_bytes` of a rank surely fit."""
    usable_bytes = (1.0 + FULL_SIZE.share) * sure_bytes + LOST_PAGES_BYTES
    return (usable_bytes + DRIVER_GIB * GIB) / (1.0 - DRIVER_SHARE)

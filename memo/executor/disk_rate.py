"""Measures how fast a disk writes and reads records."""

import time
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from memo.executor.disk_budget import DiskBudget
from memo.executor.host_pool import HostPool
from memo.executor.record_file import RecordFile
from memo.spec.disk import Disk
from memo.units import MIB

_PROBE_BYTES = 32 * MIB
_NUM_PROBES = 4


def measured_disk(budget: DiskBudget) -> Disk:
    """Measure the rates of writing and reading records; returns them with the bytes that the budget has left.

    Ranks that call it together share the disk meanwhile, as they will in training.
    """
    pool = HostPool(_NUM_PROBES, _PROBE_BYTES, torch.device("cpu"))
    with closing(pool), closing(RecordFile(budget.directory, _NUM_PROBES, _PROBE_BYTES)) as file:
        write_s, read_s = _seconds(file.write, pool), _seconds(file.read, pool)
        is_direct = file.is_direct
    num_bytes = _NUM_PROBES * _PROBE_BYTES
    return Disk(budget.left_bytes, num_bytes / write_s, num_bytes / read_s, is_direct)


def _seconds(transfer: Callable[[int, Tensor], None], pool: HostPool) -> float:
    begin_s = time.perf_counter()
    for index in range(_NUM_PROBES):
        transfer(index, pool.record(index))
    return max(time.perf_counter() - begin_s, 1e-9)

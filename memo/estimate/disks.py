"""The local disks of a machine that is planned for."""

from dataclasses import replace

from memo.errors import ConfigError
from memo.estimate.hardware import Hardware

NVME_PATH = "/nvme"
"""The directory of a node's disks that a planned run names if it is told no other."""
NVME_GB_PER_S = 2.0
"""Rate of a node's disks that is assumed if none is given: what one data-centre drive writes for hours; reads are
faster."""


def with_disks(machine: Hardware, gib: float | None, gb_per_s: float | None) -> Hardware:
    """A machine with disks of `gib` GiB a node; default: its own, which may be none.

    Raises ConfigError for the rate of disks that are not there.
    """
    gib = machine.nvme_gib if gib is None else gib
    if not gib:
        if gb_per_s is not None:
            raise ConfigError(f"--nvme-gb-per-s {gb_per_s:g} is of a disk, but --nvme-gib is not given: give both")
        return machine
    rate = gb_per_s or machine.nvme_gb_per_s or NVME_GB_PER_S
    return replace(machine, nvme_gib=gib, nvme_gb_per_s=rate)

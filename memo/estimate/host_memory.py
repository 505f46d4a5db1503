"""How much host memory is free, of the machine or inside a container, and how much of that a run may take."""

from memo.estimate.cgroups import ControlGroup, own_control_groups
from memo.units import GIB

HOST_FITS_SHARE = 0.9
"""Share of free host memory that a run may surely take: the rest of the process and the page cache need some, too."""


def node_budget_bytes(free_bytes: float, limit_gib: float | None) -> int:
    """Host memory that activations and states of all ranks of a node may take if `free_bytes` of it are free.

    Args:
        limit_gib: --offload-host-memory-gib; None for as much as surely fits.
    """
    return int(free_bytes * HOST_FITS_SHARE if limit_gib is None else min(free_bytes, limit_gib * GIB))


def available_host_bytes() -> int:
    """The smaller of the machine's available memory and what each control group of this process has left.

    Page cache that the kernel can drop counts as free in both.
    """
    import psutil  # here, because plans and estimates of other machines import this module but never call this

    available = int(psutil.virtual_memory().available)
    groups = own_control_groups("memory")
    return max(0, min([available, *(free for group in groups for free in _free_bytes(group))]))


def total_host_bytes() -> int:
    """The smaller of the machine's memory and the limit of each control group of this process, in use or not."""
    import psutil

    limits = [limit for group in own_control_groups("memory") if (limit := _limit(group)) is not None]
    return min([int(psutil.virtual_memory().total), *limits])


def _limit(group: ControlGroup) -> int | None:
    """The limit of a control group in bytes; None if it sets none."""
    name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
    try:
        text = (group.folder / name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _free_bytes(group: ControlGroup) -> list[int]:
    """[bytes left in a control group], or [] if it sets no limit."""
    if group.version == 2:
        usage, cache = "memory.current", "inactive_file"
    else:
        usage, cache = "memory.usage_in_bytes", "total_inactive_file"
    limit = _limit(group)
    if limit is None:
        return []
    try:
        used = int((group.folder / usage).read_text())
        stat = (group.folder / "memory.stat").read_text()
    except OSError:
        return []
    reclaimable = dict(line.split() for line in stat.splitlines()).get(cache, "0")
    return [limit - used + int(reclaimable)]

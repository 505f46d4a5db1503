"""How much host memory is free, of the machine or inside a container, and how much of that a run may take."""

from pathlib import Path

from memo.estimate.cgroups import CGROUP_ROOT, OWN_CGROUPS, ControlGroup, own_control_groups
from memo.units import GIB

HOST_FITS_SHARE = 0.9
"""Of free host memory, what surely fits: the rest of the process, and the page cache, still need some."""


def node_budget_bytes(free_bytes: float, limit_gib: float | None) -> int:
    """What activations and states of all ranks of a node may take of its host memory, of which `free_bytes` are free.

    Args:
        limit_gib: --offload-host-memory-gb; None: as much as surely fits.
    """
    return int(free_bytes * HOST_FITS_SHARE if limit_gib is None else min(free_bytes, limit_gib * GIB))


def available_host_bytes(cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The smaller of the machine's available memory and what each control group above us has left.

    Page cache that the kernel can drop counts as free in both. The arguments are for tests.
    """
    import psutil  # here, because plans and estimates of other machines import this package and never ask

    available = int(psutil.virtual_memory().available)
    groups = own_control_groups("memory", cgroup_root, own_cgroups)
    return max(0, min([available, *(room for group in groups for room in _room(group))]))


def total_host_bytes(cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The smaller of the machine's memory and the limit of each control group above us, whoever holds it now."""
    import psutil

    groups = own_control_groups("memory", cgroup_root, own_cgroups)
    limits = [limit for group in groups if (limit := _limit(group)) is not None]
    return min([int(psutil.virtual_memory().total), *limits])


def _limit(group: ControlGroup) -> int | None:
    """Of a control group, in bytes; None where it sets none."""
    name = "memory.max" if group.version == 2 else "memory.limit_in_bytes"
    try:
        text = (group.folder / name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)


def _room(group: ControlGroup) -> list[int]:
    """Bytes left in a control group; nothing where it sets no limit."""
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

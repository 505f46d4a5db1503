"""How much host memory this process may still take: the machine's, or less inside a container."""

from pathlib import Path

from memo.estimate.cgroups import CGROUP_ROOT, OWN_CGROUPS, ControlGroup, own_control_groups


def available_host_bytes(cgroup_root: Path = CGROUP_ROOT, own_cgroups: Path = OWN_CGROUPS) -> int:
    """The smaller of the machine's available memory and what each control group above us has left.

    Page cache that the kernel can drop counts as free in both. The arguments are for tests.
    """
    import psutil  # here, because plans and estimates of other machines import this package and never ask

    available = int(psutil.virtual_memory().available)
    groups = own_control_groups("memory", cgroup_root, own_cgroups)
    return max(0, min([available, *(room for group in groups for room in _room(group))]))


def _room(group: ControlGroup) -> list[int]:
    """Bytes left in a control group; nothing where it sets no limit."""
    if group.version == 2:
        limit, usage, cache = "memory.max", "memory.current", "inactive_file"
    else:
        limit, usage, cache = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
    try:
        limit_text, used = (group.folder / limit).read_text().strip(), int((group.folder / usage).read_text())
        stat = (group.folder / "memory.stat").read_text()
    except OSError:
        return []
    reclaimable = dict(line.split() for line in stat.splitlines()).get(cache, "0")
    return [] if limit_text == "max" else [int(limit_text) - used + int(reclaimable)]

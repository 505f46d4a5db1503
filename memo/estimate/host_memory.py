"""How much host memory this process may still take: the machine's, or less inside a container."""

from pathlib import Path

import psutil

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")


def available_host_bytes(cgroup_root: Path = _CGROUP_ROOT, own_cgroups: Path = _OWN_CGROUPS) -> int:
    """The smaller of the machine's available memory and what each control group above us has left.

    Page cache that the kernel can drop counts as free in both. The arguments are for tests.
    """
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *_cgroup_rooms(cgroup_root, own_cgroups)]))


def _cgroup_rooms(root: Path, own_cgroups: Path) -> list[int]:
    """Bytes left in our control group and its parents, version 2 (`0::/path`) or 1 (`N:memory:/path`)."""
    try:
        lines = own_cgroups.read_text().splitlines()
    except OSError:
        return []  # no control groups: not Linux
    rooms = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, usage, cache = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, usage, cache = (
                root / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
                "total_inactive_file",
            )
        else:
            continue
        # A container may see its own group as the root, where the path of the host does not exist.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            rooms += _room(folder / limit, folder / usage, folder / "memory.stat", cache)
    return rooms


def _room(limit: Path, usage: Path, stat: Path, cache: str) -> list[int]:
    try:
        limit_text, used = limit.read_text().strip(), int(usage.read_text())
        reclaimable = dict(line.split() for line in stat.read_text().splitlines()).get(cache, "0")
    except OSError:
        return []
    return [] if limit_text == "max" else [int(limit_text) - used + int(reclaimable)]

"""The control groups that bound this process: its own and each above it, of version 1 or 2."""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

CGROUP_ROOT = Path("/sys/fs/cgroup")
OWN_CGROUPS = Path("/proc/self/cgroup")


class ControlGroup(NamedTuple):
    """A folder of the control group file system; its files are named by `version`, 1 or 2."""

    folder: Path
    version: int


def own_control_groups(controller: str) -> Iterator[ControlGroup]:
    """The control groups that may limit `controller`, such as "memory" or "cpu"; none if the system has none.

    The system lists them in lines `0::/path` for version 2 and `N:controllers:/path` for version 1.
    """
    try:
        lines = OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return  # not Linux
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, version = CGROUP_ROOT, 2
        elif controller in controllers.split(","):
            base, version = CGROUP_ROOT / controller, 1
        else:
            continue
        # A container may see its own group as the root, and then the path that the host uses does not exist.
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            yield ControlGroup(folder, version)

"""Files that tell a container its limits."""

from pathlib import Path


def control_groups(folder: Path, own: str, groups: dict[str, dict[str, object]]) -> tuple[Path, Path]:
    """Write a made-up /sys/fs/cgroup and /proc/self/cgroup, and return their paths."""
    (folder / "own").write_text(own)
    for path, values in groups.items():
        group = folder / "cgroup" / path
        group.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (group / name).write_text(f"{value}\n")
    return folder / "cgroup", folder / "own"

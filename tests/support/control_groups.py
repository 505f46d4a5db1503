"""Files that tell a container its limits."""

from pathlib import Path

import pytest

from memo.estimate import cgroups


def control_groups(
    folder: Path, own: str | None, groups: dict[str, dict[str, object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a made-up /sys/fs/cgroup and /proc/self/cgroup in the place of the real ones; `own`: None: the system has
    none."""
    monkeypatch.setattr(cgroups, "CGROUP_ROOT", folder / "cgroup")
    monkeypatch.setattr(cgroups, "OWN_CGROUPS", folder / "missing" if own is None else folder / "own")
    (folder / "own").write_text(own or "")
    for path, values in groups.items():
        group = folder / "cgroup" / path
        group.mkdir(parents=True, exist_ok=True)
        for name, value in values.items():
            (group / name).write_text(f"{value}\n")

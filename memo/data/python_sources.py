"""The sources of Python's standard library, of which `memo data demo` makes a corpus on every machine."""

import sysconfig
from pathlib import Path

from memo.data.file_kinds import walk

_INSTALLED_PACKAGES = frozenset({"site-packages", "dist-packages"})


def standard_library() -> Path:
    """Folder of this Python's own sources."""
    return Path(sysconfig.get_path("stdlib"))


def python_sources(folder: Path) -> list[Path]:
    """Every .py file below `folder` outside of installed packages, sorted by relative path."""
    return [
        path
        for path in walk(folder)
        if path.suffix == ".py" and _INSTALLED_PACKAGES.isdisjoint(path.relative_to(folder).parts)
    ]

"""The sources of Python's standard library, of which `memo data demo` makes a corpus on every machine."""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from memo.data.arrow_tables import Record
from memo.data.file_kinds import walk
from memo.data.records import RecordPiece, grouped

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


def read_python_sources(folder: Path) -> Iterator[RecordPiece]:
    """Every UTF-8 file of `python_sources` as a document.

    Sources in another encoding are skipped: the standard library keeps a few to test Python itself.
    """
    return grouped(folder, "source", _sources(folder))


def _sources(folder: Path) -> Iterator[Record]:
    done_bytes = 0
    for number, path in enumerate(python_sources(folder), 1):
        content = path.read_bytes()
        done_bytes += len(content)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError:
            continue
        yield number, text, len(content), done_bytes

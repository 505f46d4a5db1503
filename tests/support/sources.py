"""The repository as somebody who clones it gets it: what git tracks."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked() -> list[str]:
    """Paths of the files that git tracks and that are there."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(folder: Path) -> None:
    """A fresh copy of them in `folder`, which is made."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)

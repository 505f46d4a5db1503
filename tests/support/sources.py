"""The repository as a clone has it: the files that git tracks."""

import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def tracked() -> list[str]:
    """Return the paths of existing files that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(folder: Path) -> None:
    """Copy the tracked files to `folder`, which is made."""
    for name in tracked():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)

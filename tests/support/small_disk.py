"""A file system with little room, if this process may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Yield `folder` with room for `num_bytes`; skip the test if nothing may be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("only root may mount a small disk; a limit on file sizes stands for it in other tests")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)

"""Checks before the first step that the disk has space for the checkpoints of a run."""

import os
import shutil
from pathlib import Path

from memo.checkpoint.directory import whole_checkpoints
from memo.errors import ResourceError
from memo.units import format_bytes

CHECKPOINTS_AHEAD = 2
"""Number of checkpoints for which a run must find space: an older one is deleted only when a newer one is whole, and
any run may be stopped and resumed, which saves once more."""


def check_disk_space(directory: str | Path, checkpoint_bytes: int, keep_latest_k: int) -> None:
    """Raises ResourceError when the file system of `directory`, which exists, lacks space for the next checkpoints.

    With keep_latest_k, the space of older checkpoints that will be deleted counts as free; so does, in any case, the
    space of checkpoints that an interrupted save left unfinished.
    """
    root = Path(directory)
    num_whole = len(whole_checkpoints(root))
    num_new = CHECKPOINTS_AHEAD
    if keep_latest_k:
        num_new -= max(0, min(num_whole + 1 - keep_latest_k, CHECKPOINTS_AHEAD - 1))
    free_bytes = shutil.disk_usage(root).free + sum(_size_bytes(left) for left in root.glob("iter_*.partial"))
    needed_bytes = num_new * checkpoint_bytes
    if free_bytes < needed_bytes:
        plural = "s" if num_new > 1 else ""
        raise ResourceError(
            f"--save {root}: its file system has {format_bytes(free_bytes)} free, but {num_new} checkpoint{plural} of "
            f"{format_bytes(checkpoint_bytes)} must fit: {format_bytes(needed_bytes - free_bytes)} is missing; free "
            "disk space, or give another directory"
        )


def _size_bytes(folder: Path) -> int:
    return sum(os.lstat(path).st_size for path in folder.rglob("*"))

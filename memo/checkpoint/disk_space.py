"""Checks before the first step that the disk has space for the checkpoints of a run."""

import os
import shutil
from pathlib import Path

from memo.checkpoint.directory import whole_checkpoints
from memo.errors import ResourceError
from memo.units import format_bytes

CHECKPOINTS_AHEAD = 2
"""Number of checkpoints for which a run needs space: an old checkpoint is deleted only when a newer one is whole, and a
run that is stopped and resumed saves once more."""


def check_disk_space(directory: str | Path, checkpoint_bytes: int, keep_latest_k: int) -> None:
    """Raises ResourceError if the file system of the existing `directory` lacks space for the next checkpoints.

    Unfinished checkpoints of interrupted saves count as free space; with keep_latest_k, so do older checkpoints that
    will be deleted.
    """
    root = Path(directory)
    num_whole = len(whole_checkpoints(root))
    num_new = CHECKPOINTS_AHEAD
    if keep_latest_k:
        num_new -= max(0, min(num_whole + 1 - keep_latest_k, CHECKPOINTS_AHEAD - 1))
    unfinished = (path for left in root.glob("iter_*.partial") for path in left.rglob("*"))
    free_bytes = shutil.disk_usage(root).free + sum(os.lstat(path).st_size for path in unfinished)
    needed_bytes = num_new * checkpoint_bytes
    if free_bytes < needed_bytes:
        plural = "s" if num_new > 1 else ""
        raise ResourceError(
            f"--save {root}: its file system has {format_bytes(free_bytes)} free, but {num_new} checkpoint{plural} of "
            f"{format_bytes(checkpoint_bytes)} must fit: {format_bytes(needed_bytes - free_bytes)} is missing; free "
            "disk space, or give another directory"
        )

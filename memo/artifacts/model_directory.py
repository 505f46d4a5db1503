"""Finds files of a model directory, which may be downloaded, and refuses links that lead out of it.

A link in a downloaded directory can point at any file of this machine, and memo copies files from there into
directories that people may publish. So a link is followed only if its target lies in the same directory, or in the
cache of Hugging Face's hub among the files of the same model. The cache stores every file once and links to it:

    models--ORG--NAME/snapshots/REVISION/tokenizer.json -> ../../blobs/6f1c...

The directory itself may be a link, because the user has named it.
"""

import os
import stat
from pathlib import Path

from memo.artifacts.reading import shown
from memo.artifacts.regular_file import kind_of_file
from memo.errors import RIGHTS, CheckpointError


def path_within(directory: str | Path, name: str) -> Path:
    """The path of DIR/name with all links resolved; it need not exist.

    Raises CheckpointError if the path leads out of DIR.
    """
    root = Path(os.path.realpath(directory))
    if "\0" in name:
        raise CheckpointError(f"{directory} names the file {shown(name)}, which no file can be called: remove it")
    found = Path(os.path.realpath(root / name))
    if found.is_relative_to(root) or any(found.is_relative_to(store) for store in _hub_store(root)):
        return found
    raise CheckpointError(
        f"{Path(directory) / name} is a link to {found}, outside of {directory}: replace it with a copy if the "
        "directory shall have that file, or remove it"
    )


def model_file(directory: str | Path, name: str) -> Path | None:
    """The path, without links, of the regular file DIR/name; None if nothing has that name.

    Raises CheckpointError for a link that leads out of DIR and for anything but a regular file (reading a named pipe
    would wait for ever, and a device has no end).
    """
    found = path_within(directory, name)
    try:
        mode = found.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        remedy = RIGHTS if isinstance(error, PermissionError) else "repair or remove it"
        raise CheckpointError(f"{Path(directory) / name} cannot be read ({error.strerror}): {remedy}") from None
    if not stat.S_ISREG(mode):
        raise CheckpointError(
            f"{Path(directory) / name} is {kind_of_file(mode)}, not a regular file: remove it, or put the "
            "model's file there"
        )
    return found


def _hub_store(root: Path) -> list[Path]:
    """[folder of the hub's cache with the files of the snapshot `root`], or [] if `root` is no snapshot."""
    is_snapshot = root.parent.name == "snapshots" and root.parents[1].name.startswith(("models--", "datasets--"))
    return [root.parents[1] / "blobs"] if is_snapshot else []

"""The cache of measurements in the user's folder: a file for each layer profile, and a table of attention kernels for
each device and version."""

import hashlib
from pathlib import Path

from memo.artifacts.attention_table import AttentionTable
from memo.artifacts.cache_folder import cache_folder
from memo.artifacts.layer_profile import ProfileKey
from memo.errors import ArtifactError


def cache_file(choice: str, key: ProfileKey) -> Path | None:
    """The file of the profile of `key`; None if profiles are not kept.

    Args:
        choice: --profile-cache: "auto" (memo/layer_profiles in $XDG_CACHE_HOME or ~/.cache), "off", or a directory.
    """
    folder = _folder(choice)
    return None if folder is None else folder / f"{key.digest}.json"


def attention_table_file(choice: str, empty: AttentionTable) -> Path | None:
    """The file of the table for the device and versions of `empty`; `choice` and None: see `cache_file`."""
    folder = _folder(choice)
    digest = hashlib.sha256(f"{empty.device}\n{empty.torch}\n{empty.memo}".encode()).hexdigest()[:32]
    return None if folder is None else folder / f"attention-{digest}.json"


def read_attention_table(path: Path, empty: AttentionTable) -> AttentionTable:
    """The table in file `path`; `empty` if there is no file.

    Raises ArtifactError for a file without a table, or with the table of another device or version.
    """
    if not path.exists():
        return empty
    table = AttentionTable.load(path)
    if (table.device, table.torch, table.memo) != (empty.device, empty.torch, empty.memo):
        raise ArtifactError(f"{path} holds the table of another device or version: delete it")
    return table


def _folder(choice: str) -> Path | None:
    if choice == "off":
        return None
    try:
        return cache_folder("layer_profiles") if choice == "auto" else Path(choice).expanduser()
    except RuntimeError:  # no home directory
        return None

"""Measurements that are kept between runs in a folder of the user: a file for each layer, and a table of attention
kernels for each device and versions."""

import hashlib
from pathlib import Path

from memo.artifacts.attention_table import AttentionTable
from memo.artifacts.cache_folder import cache_folder
from memo.artifacts.layer_profile import ProfileKey
from memo.errors import ArtifactError


def cache_file(choice: str, key: ProfileKey) -> Path | None:
    """The file in which the profile of `key` is kept; None if profiles are not kept.

    Args:
        choice: --profile-cache: "auto" ($XDG_CACHE_HOME/memo/layer_profiles, or the same below ~/.cache), "off",
            or a directory.
    """
    folder = _folder(choice)
    return None if folder is None else folder / f"{key.digest}.json"


def attention_table_file(choice: str, empty: AttentionTable) -> Path | None:
    """The file in which the table of `empty`'s device and versions is kept; None and `choice` as in `cache_file`."""
    folder = _folder(choice)
    digest = hashlib.sha256(f"{empty.device}\n{empty.torch}\n{empty.memo}".encode()).hexdigest()[:32]
    return None if folder is None else folder / f"attention-{digest}.json"


def read_attention_table(path: Path, empty: AttentionTable) -> AttentionTable:
    """The table at `path`; `empty` if there is none.

    Raises ArtifactError for a file with other content, or with the table of another device or version.
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

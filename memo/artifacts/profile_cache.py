"""Measured layers kept between runs: one file for each key, in a folder of the user."""

import os
from pathlib import Path

from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.errors import ArtifactError


def cache_file(choice: str, key: ProfileKey) -> Path | None:
    """Where the profile of `key` is kept; None where none is.

    Args:
        choice: --profile-cache: "auto" ($XDG_CACHE_HOME/memo/layer_profiles, or the same below ~/.cache), "off",
            or a directory.
    """
    if choice == "off":
        return None
    try:
        folder = _user_folder() if choice == "auto" else Path(choice).expanduser()
    except RuntimeError:  # no home directory
        return None
    return folder / f"{key.digest}.json"


def read_cached(path: Path, key: ProfileKey) -> LayerProfile | None:
    """The profile kept at `path`; None where there is none.

    Raises ArtifactError for a file that holds something else, or the profile of another key.
    """
    if not path.exists():
        return None
    profile = LayerProfile.load(path)
    if profile.key != key:
        raise ArtifactError(f"{path} holds the profile of another layer: delete it")
    return profile


def _user_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The standard says: a relative path is no path.
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".cache"
    return base / "memo" / "layer_profiles"

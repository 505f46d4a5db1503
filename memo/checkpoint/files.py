"""The files of one checkpoint: their names, and how one is found and refused. No torch here."""

from pathlib import Path

from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source
from memo.errors import CheckpointError

INDEX = "index.json"
RUN_STATE = "run_state.json"


def checkpoint_file(final: Path, name: str) -> Path:
    """The path of a file of a checkpoint; raises CheckpointError when it is missing, no plain file, or leads out."""
    if Path(name).name != name or name in ("", "..") or "\0" in name:
        raise CheckpointError(f"{name!r} is no name of a file in a checkpoint")
    found = model_file(final, name)
    if found is None:
        raise CheckpointError(f"{name} is not there")
    return found


class DamagedError(CheckpointError):
    """Bytes that are not those that were written: their checksum says so."""


def damaged(name: str) -> Source:
    """How a file is refused that does not hold what memo writes into it; the caller says what helps."""
    return Source(name, CheckpointError, "it is damaged, or no file of memo's")

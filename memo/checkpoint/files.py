"""The files of one checkpoint: their names, paths and errors. No torch here."""

from pathlib import Path

from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source
from memo.config.run import RUN_CONFIG as RUN_CONFIG
from memo.errors import CheckpointError

INDEX = "index.json"
RUN_STATE = "run_state.json"


def checkpoint_file(final: Path, name: str) -> Path:
    """The path of file `name` of a checkpoint.

    Raises CheckpointError if the file is missing, is not regular, or lies outside the checkpoint.
    """
    found = model_file(final, name)
    if found is None:
        raise CheckpointError(f"{name} is not there")
    return found


class DamagedError(CheckpointError):
    """The bytes of a file do not have the checksum with which they were written."""


def damaged(name: str) -> Source:
    """The source of errors about a file with content that memo does not write; the caller adds a remedy."""
    return Source(name, CheckpointError, "it is damaged, or no file of memo's")

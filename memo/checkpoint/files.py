"""The files of one checkpoint: their names, and how they are found and refused. No torch here."""

from pathlib import Path

from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source
from memo.config.run import RUN_CONFIG as RUN_CONFIG
from memo.errors import CheckpointError

INDEX = "index.json"
RUN_STATE = "run_state.json"


def checkpoint_file(final: Path, name: str) -> Path:
    """The path of a file of a checkpoint.

    Raises CheckpointError if it is missing, is no regular file, or leads out of the checkpoint.
    """
    found = model_file(final, name)
    if found is None:
        raise CheckpointError(f"{name} is not there")
    return found


class DamagedError(CheckpointError):
    """Bytes whose checksum differs from that of the bytes that were written."""


def damaged(name: str) -> Source:
    """The source of errors about a file whose content is not what memo writes; the caller adds what helps."""
    return Source(name, CheckpointError, "it is damaged, or no file of memo's")

"""Documents of files one by one, for tests that need no pieces."""

from collections.abc import Sequence
from pathlib import Path

from memo.data.left_out import Refuse, raise_it
from memo.data.records import read_pieces


def read_documents(files: Sequence[Path], key: str, refuse: Refuse = raise_it) -> list[str]:
    """Every document of the files; `refuse` is asked about files and about single records."""
    return [text for piece in read_pieces(files, key, refuse) for text in piece.texts(key, refuse)]

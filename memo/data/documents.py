"""Documents one by one, for whoever needs no pieces: to train a tokenizer, and the sources of Python."""

import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from memo.data.file_kinds import walk
from memo.data.records import PIECE_BYTES, Piece, read_pieces
from memo.errors import DataError

_INSTALLED_PACKAGES = frozenset({"site-packages", "dist-packages"})


def raise_it(error: DataError) -> None:
    """What to do about a record that cannot be read, where nothing is left out."""
    raise error


def read_documents(
    files: Sequence[Path], json_key: str, refuse: Callable[[DataError], None] = raise_it
) -> Iterator[str]:
    """Every document of the files. `refuse` is as of `read_pieces`, and is asked about single records as well."""
    return texts_of(read_pieces(files, json_key, refuse), json_key, refuse)


def texts_of(pieces: Iterable[Piece], json_key: str, refuse: Callable[[DataError], None]) -> Iterator[str]:
    """The documents of pieces."""
    for piece in pieces:
        for place in range(len(piece.records)):
            try:
                text = piece.text(place, json_key)
            except DataError as error:
                refuse(error)
                continue
            yield text


def standard_library() -> Path:
    """Folder of this Python's own sources."""
    return Path(sysconfig.get_path("stdlib"))


def read_python_sources(folder: Path) -> Iterator[Piece]:
    """Every UTF-8 .py file below `folder` outside of installed packages, sorted by relative path, as a document.

    Sources in another encoding are skipped: the standard library keeps a few to test Python itself.
    """
    texts: list[str] = []
    done_bytes = first = 0
    for path in python_sources(folder):
        content = path.read_bytes()
        done_bytes += len(content)
        try:
            texts.append(content.decode("utf-8"))
        except UnicodeDecodeError:
            continue
        if done_bytes - first >= PIECE_BYTES:
            yield _piece(folder, texts, done_bytes)
            texts, first = [], done_bytes
    if texts:
        yield _piece(folder, texts, done_bytes)


def python_sources(folder: Path) -> list[Path]:
    """Every .py file below `folder` outside of installed packages."""
    return [
        path
        for path in walk(folder)
        if path.suffix == ".py" and _INSTALLED_PACKAGES.isdisjoint(path.relative_to(folder).parts)
    ]


def _piece(folder: Path, texts: list[str], done_bytes: int) -> Piece:
    return Piece(str(folder), "source", list(range(len(texts))), list(texts), done_bytes)

"""Records of files one by one, for tests that need no pieces, and corpora of given ids."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from numpy.typing import ArrayLike, DTypeLike

from memo.data.conversations import ChatForm, Conversation, conversation_of
from memo.data.indexed import IndexedDatasetWriter
from memo.data.records import Made, read_pieces, text_of
from memo.errors import DataError


def raise_it(error: DataError) -> None:
    raise error


def _read(
    files: Sequence[Path],
    make: Callable[[object, str], Made],
    refuse: Callable[[DataError], None],
    column: str | None,
) -> list[Made]:
    found = []
    for piece in read_pieces(files, column, lines_of_text=column is None):
        made, errors = piece.each(make)
        found += made
        for error in errors:
            refuse(error)
    return found


def read_documents(files: Sequence[Path], key: str, refuse: Callable[[DataError], None] = raise_it) -> list[str]:
    """Every document of the files; `refuse` is told about files and about single records."""
    return _read(files, partial(text_of, key=key), refuse, key)


def read_conversations(files: Sequence[Path], form: ChatForm | None = None) -> list[Conversation]:
    """Every conversation of the files. Raises DataError for a file or a record that cannot be read."""
    return _read(files, partial(conversation_of, form=form), raise_it, None)


def write_corpus(prefix: str | Path, documents: Iterable[ArrayLike], dtype: DTypeLike = "<u2") -> str:
    """Write documents of token ids, or of marks of answers; return the prefix."""
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(document)
    return str(prefix)

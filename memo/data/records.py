"""Reads files as records: a line of JSON, an element of a list, a row of a table, or a whole text.

Records come in pieces of about a megabyte, in the order of the files. Records of JSON are not parsed here, because
parsing is most of the work and several processes may share it (`memo.data.encode`).
"""

import gzip
import importlib
import io
import json
import lzma
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from memo.artifacts.reading import (
    MAX_BYTES,
    MAX_VALUES,
    Source,
    decoded,
    kind_of,
    listed,
    opened,
    parse_json,
    read_lines,
    read_table,
)
from memo.data.conversations import is_conversation
from memo.data.file_kinds import COMPRESSED_SUFFIXES, file_kind
from memo.data.tables import MEMORY_BYTES, Record, package, table_rows
from memo.errors import DataError, MemoError

PIECE_BYTES, _PIECE_RECORDS = 1 << 20, 10_000
"""Limits of a piece: small enough that many processes share the work and that pieces are streamed."""
_CHUNK_CHARACTERS = 1 << 20
_LARGEST_DOCUMENT_BYTES = 1 << 31
"""Limit of one text: an index counts the tokens of a document in 31 bits."""
_MOST_EXPANSION = 100
"""Factor by which a compressed text above MAX_BYTES may grow; usual texts grow by three to ten."""
_MOST_PADDING_BYTES = 1 << 20
"""Limit of zeros after the content of a gzip file; the padding of a tape's block has a few thousand."""
_FAULTS = (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError)
"""Errors that readers raise for a damaged file, besides the errors of pyarrow."""
_BLANKS = re.compile(r"[ \t\r\n]*")

Made = TypeVar("Made")


@dataclass(frozen=True)
class RecordPiece:
    """Consecutive records of one file."""

    file: str
    unit: str
    """"line", "element" or "row"; "" if the file is one record."""
    numbers: list[int]
    """From 1 on."""
    records: list[Any]
    """JSON as bytes, rows as dicts, texts, or the errors of rows."""
    done_bytes: int = 0
    """Bytes of all files read at the end of this piece."""
    broken: DataError | None = None
    """The reason if the file cannot be read after these records."""

    def each(self, make: Callable[[Any, str], Made]) -> tuple[list[Made], list[DataError]]:
        """Return the results of make(value, where) for all records, and the errors: of records that are no JSON or that
        `make` refuses, and of a broken file. `where` is a place such as "a.jsonl, line 3"."""
        made, errors = [], []
        for number, record in zip(self.numbers, self.records, strict=True):
            where = f"{self.file}, {self.unit} {number}" if self.unit else self.file
            try:
                if isinstance(record, DataError):
                    raise record
                if isinstance(record, bytes):
                    record = parse_json(record, Source(where, DataError, f"repair or remove the {self.unit}"))
                made.append(make(record, where))
            except DataError as error:
                errors.append(error)
        return made, errors if self.broken is None else [*errors, self.broken]


def text_of(record: Any, where: str, key: str) -> str:
    """The document of a record: its string under `key`, or the whole text. Raises DataError that names the record."""
    text = record.get(key) if isinstance(record, dict) else record
    if isinstance(text, str):
        utf8(text, where)
        return text
    remedy = "set the JSON key, or column, that holds texts (--json-key)"
    found = f"[{listed(sorted(record))}]" if isinstance(record, dict) else kind_of(record)
    if isinstance(record, dict) and is_conversation(record):
        remedy = "these are conversations, of which `memo data chat` makes a corpus"
    problem = f"no string under the key {key!r}, found {found}; {remedy}"
    if isinstance(record, dict) and key in record:
        problem = f"the key {key!r} holds {kind_of(text)}, not a string; {remedy}"
    raise DataError(f"{where}: {problem}")


def utf8(text: str, where: str) -> bytes:
    """Encode `text`; raises DataError for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair ({error}); repair or remove the line") from error


def read_pieces(files: Sequence[Path], column: str | None, *, lines_of_text: bool = False) -> Iterator[RecordPiece]:
    """Yield the records of all files in turn; a file that cannot be read ends with a broken piece.

    Only `column` is read from tables that have it. With `lines_of_text` a file with an unknown suffix has lines of JSON
    rather than one text. Raises ConfigError for a file that needs a package that is not installed.
    """
    before = 0
    for path in files:
        kind: str = file_kind(path) or "text"
        yield from _pieces(path, "lines" if kind == "text" and lines_of_text else kind, column, before)
        before += path.stat().st_size


def _pieces(path: Path, kind: str, column: str | None, before: int) -> Iterator[RecordPiece]:
    """Yield the pieces of one file; `before`: bytes of the files before it."""
    unit, numbers, records, num_bytes, position = "", [], [], 0, 0
    broken: DataError | None = None
    try:
        for unit, (number, record, size), position in _records(path, kind, column):
            numbers.append(number)
            records.append(record)
            num_bytes += size
            if num_bytes >= PIECE_BYTES or len(records) >= _PIECE_RECORDS:
                yield RecordPiece(str(path), unit, numbers, records, before + position)
                numbers, records, num_bytes = [], [], 0
    except DataError as error:
        broken = error
    if records or broken:
        yield RecordPiece(str(path), unit, numbers, records, before + position, broken)


def _records(path: Path, kind: str, column: str | None) -> Iterator[tuple[str, Record, int]]:
    """Yield (unit, record, bytes of the file that have been read) for each record of a file."""
    source = Source(str(path), DataError, "fetch or write it again, texts in UTF-8")
    with opened(path, source) as raw, _told(source):
        if kind in ("parquet", "arrow"):
            with package("pyarrow", path).memory_map(str(path)) as mapped:
                for record in table_rows(mapped, kind, path, column):
                    yield "row", record, mapped.tell()
            return
        suffix = path.suffix.lower()
        with _UNPACKERS[suffix](raw, path) if suffix in COMPRESSED_SUFFIXES else nullcontext(raw) as file:
            if kind == "json":
                kind = "list" if _begins_a_list(file) else "lines"
            unit, reader = _READERS[kind]
            for record in reader(file, source, path):
                yield unit, record, raw.tell()


@contextmanager
def _told(source: Source) -> Iterator[None]:
    """Turn the errors of all readers into one message."""
    try:
        yield
    except MemoError:
        raise
    except MemoryError:
        raise source.refusal(
            f"takes more than {MEMORY_BYTES >> 20} MiB of memory to read: a record is too large, or the file damaged",
            "split it, or fetch or write it again",
        ) from None
    except UnicodeDecodeError as error:
        raise source.refusal(f"is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except Exception as error:
        if not isinstance(error, _FAULTS) and not type(error).__module__.startswith("pyarrow"):
            raise
        raise source.refusal(f"cannot be read ({' '.join(str(error).split())[:200]})") from None


def _zstandard(raw: BinaryIO, path: Path) -> BinaryIO:
    pyarrow = package("pyarrow", path)
    return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(raw, mode="r"), "zstd"), 1 << 20)


class _LittlePadding(io.RawIOBase):
    """A file that refuses many zeros at its end. Python's gzip skips them singly, and a sparse file has billions."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self._num_zeros = raw, 0

    def read(self, size: int = -1) -> bytes:
        found = self._raw.read(size)
        self._num_zeros = self._num_zeros + 1 if found == b"\0" else 0
        if self._num_zeros > _MOST_PADDING_BYTES:
            raise OSError(f"more than {_MOST_PADDING_BYTES} zeros follow its end")
        return found


_UNPACKERS: dict[str, Callable[[BinaryIO, Path], AbstractContextManager[BinaryIO]]] = {
    ".gz": lambda raw, _: cast(Any, gzip.GzipFile(fileobj=cast(Any, _LittlePadding(raw)))),
    ".bz2": lambda raw, _: cast(Any, importlib.import_module("bz2").BZ2File(raw)),  # some builds of Python lack it
    ".xz": lambda raw, _: cast(Any, lzma.LZMAFile(raw)),  # noqa: SIM115  closed by the caller
    ".zst": _zstandard,
}


def _lines(file: BinaryIO, source: Source, path: Path) -> Iterator[Record]:
    """Yield lines that are not blank."""
    for number, line in enumerate(read_lines(file, source), 1):
        if line.strip():
            yield number, line, len(line)


def _text(file: BinaryIO, source: Source, path: Path) -> Iterator[Record]:
    most = _LARGEST_DOCUMENT_BYTES
    if path.suffix.lower() in COMPRESSED_SUFFIXES:
        most = min(most, max(MAX_BYTES, _MOST_EXPANSION * path.stat().st_size))
    content = file.read(most + 1)
    if len(content) > most:
        raise source.refusal(f"has more than {most} bytes, which is the most of one document in such a file")
    yield 1, decoded(content, source), len(content)


def _csv_rows(file: BinaryIO, source: Source, path: Path) -> Iterator[Record]:
    """Yield rows of a table with commas or tabs as dicts by the names in row 1; a row of another length as an error."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]]
    rows = read_table(file, source, delimiter="\t" if ".tsv" in suffixes else ",")
    _, names = next(rows, (0, None))
    if names is None:
        raise source.refusal("is empty: its first row must name the columns")
    for number, (_, row) in enumerate(rows, start=2):
        if row:  # not a blank line
            record: Any = dict(zip(names, row, strict=False))
            if len(row) != len(names):
                record = DataError(
                    f"{path}, row {number}: {len(row)} cells, but row 1 names {len(names)} columns; put quotes around "
                    "cells with the separator, quotes or line breaks"
                )
            yield number, record, sum(map(len, row))


def _begins_a_list(file: BinaryIO) -> bool:
    """Whether the first character that is not blank opens a list; does not move the position in the stream."""
    peeked = file.peek(4096)  # type: ignore[attr-defined]
    return bool(peeked.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))


def _elements(file: BinaryIO, source: Source, path: Path) -> Iterator[Record]:
    """Yield the elements of a list as JSON; a list of any length needs the memory of a few elements."""
    text, decode = io.TextIOWrapper(file, encoding="utf-8-sig"), json.JSONDecoder().raw_decode
    buffer, at, is_all, number = "", 0, False, 0

    def read_on() -> bool:
        """Double the unread text, so that a long value is scanned few times. Returns false at the end."""
        nonlocal buffer, at, is_all
        found = text.read(max(_CHUNK_CHARACTERS, len(buffer) - at))
        buffer, at, is_all = buffer[at:] + found, 0, not found
        return not is_all

    def next_character() -> str:
        nonlocal at
        while (at := cast(re.Match[str], _BLANKS.match(buffer, at)).end()) == len(buffer) and read_on():
            pass
        return buffer[at : at + 1]

    def take(character: str) -> None:
        nonlocal at
        if (found := next_character()) != character:
            what = repr(found) if found else "its end"
            raise source.refusal(f"is not a list of JSON: {what} stands where {character!r} should", "repair the file")
        at += 1

    take("[")
    while next_character() != "]":
        if number:
            take(",")
        number += 1
        next_character()
        while True:
            problem: object = "it goes on"
            try:
                end = decode(buffer, at)[1]
                if end < len(buffer) or is_all:  # else a number may continue in the next chunk
                    break
            except RecursionError:
                raise source.refusal(f"element {number} is nested too deep", "repair the file") from None
            except ValueError as error:
                problem = error
            if is_all:
                raise source.refusal(f"element {number} is not JSON ({problem})", "repair the file")
            if len(buffer) - at > MAX_BYTES or sum(map(buffer.count, ",[{")) > MAX_VALUES + _CHUNK_CHARACTERS:
                raise source.refusal(
                    f"element {number} has more than {MAX_BYTES} characters or {MAX_VALUES} values, or is not JSON "
                    f"({problem})",
                    "split it",
                )
            read_on()
        element = buffer[at:end].encode("utf-8", "surrogatepass")
        at = end
        yield number, element, len(element)
    take("]")
    if next_character():
        raise source.refusal("goes on after the end of its list", "repair the file")


_READERS: dict[str, tuple[str, Callable[[BinaryIO, Source, Path], Iterator[Record]]]] = {
    "lines": ("line", _lines),
    "list": ("element", _elements),
    "csv": ("row", _csv_rows),
    "text": ("", _text),
}

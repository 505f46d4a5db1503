"""Files as records: a line of JSON, an element of a list, a row of a table, or a whole text.

Records come in pieces of about a megabyte, in the order of the files. Those of JSON are not parsed yet: parsing is most
of the work, and other processes may do it (`memo.data.workers`).
"""

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from memo.artifacts.reading import (
    MAX_BYTES,
    MAX_VALUES,
    Source,
    decoded,
    kind_of,
    listed,
    parse_json,
    read_lines,
    read_table,
)
from memo.data.arrow_tables import Record, arrow_rows, parquet_rows
from memo.data.chat_forms import remedy_without_texts
from memo.data.file_kinds import file_kind
from memo.data.file_stream import FileStream, open_stream
from memo.data.left_out import Refuse, read_each
from memo.errors import DataError

PIECE_BYTES = 1 << 20
"""Bytes of records that are handled together: enough for many processes to share, little enough to stream."""
_CHUNK_CHARACTERS = 1 << 20
_LARGEST_DOCUMENT_BYTES = 1 << 31
"""Limit of one text: an index counts the tokens of a document in 31 bits."""
_MOST_EXPANSION = 100
"""Times its size that a packed text may become, beyond MAX_BYTES; texts of people become three to ten times theirs."""
_TABLES = {"parquet": parquet_rows, "arrow": arrow_rows}


@dataclass(frozen=True)
class RecordPiece:
    """Neighbouring records of one file.

    Attributes:
        unit: "line", "element" or "row"; empty where the file is one record.
        numbers: of the records, from 1 on.
        records: JSON as bytes, rows as dicts, or texts.
        done_bytes: of all files, that have been read when this piece ends.
    """

    file: str
    unit: str
    numbers: list[int]
    records: list[Any]
    done_bytes: int = 0

    @property
    def places(self) -> range:
        """The numbers by which the methods below know its records."""
        return range(len(self.records))

    def where(self, place: int) -> str:
        """File and line, for messages."""
        return f"{self.file}, {self.unit} {self.numbers[place]}" if self.unit else self.file

    def read(self, place: int) -> Any:
        """The value of a record. Raises DataError for bytes that are no JSON."""
        record = self.records[place]
        if not isinstance(record, bytes):
            return record
        return parse_json(record, Source(self.where(place), DataError, f"repair or remove the {self.unit}"))

    def text(self, place: int, key: str) -> str:
        """The document of a record: its string under `key`, or all of a text. Raises DataError that names it."""
        found = self.read(place)
        text = found.get(key) if isinstance(found, dict) else found
        if not isinstance(text, str):
            raise DataError(f"{self.where(place)}: {_without_text(found, key)}")
        require_utf8(text, self.where(place))
        return text

    def texts(self, key: str, refuse: Refuse) -> Iterator[str]:
        """The documents of all its records; `key` as of `text`."""
        return read_each(self.places, partial(self.text, key=key), refuse)


def _without_text(found: Any, key: str) -> str:
    """The message about a record without a text."""
    remedy = "set the JSON key, or column, that holds texts (--json-key)"
    if not isinstance(found, dict):
        return f"no string under the key {key!r}, found {kind_of(found)}; {remedy}"
    if key in found:
        return f"the key {key!r} holds {kind_of(found[key])}, not a string; {remedy}"
    names = f"[{listed(sorted(found))}]"
    return f"no string under the key {key!r}, found {names}; {remedy_without_texts(found, remedy)}"


def require_utf8(text: str, where: str) -> None:
    """Raises DataError for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: half of a surrogate pair ({error}); repair or remove the line") from error


def read_pieces(
    files: Sequence[Path], key: str | None, refuse: Refuse, *, lines_of_text: bool = False
) -> Iterator[RecordPiece]:
    """The records of all files in turn.

    Args:
        key: the only column of tables that is needed; None for all of them.
        refuse: if it returns, the file that cannot be read is left out from there on.
        lines_of_text: a file whose name tells no kind holds lines of JSON, not one text.

    Raises ConfigError for a file that needs a package that is not installed.
    """
    before = 0
    for path in files:
        try:
            yield from _pieces(path, key, lines_of_text, before)
        except DataError as error:
            refuse(error)
        before += path.stat().st_size


def _pieces(path: Path, key: str | None, lines_of_text: bool, before: int) -> Iterator[RecordPiece]:
    kind: str = file_kind(path) or "text"
    if kind == "text" and lines_of_text:
        kind = "lines"
    if kind in _TABLES:
        yield from grouped(path, "row", _TABLES[kind](path, key), before)
    else:
        source = Source(str(path), DataError, "convert it to UTF-8, or leave it out")
        try:
            with open_stream(path, source) as stream:
                if kind == "json":
                    kind = "list" if _begins_a_list(stream) else "lines"
                    source = Source(str(path), DataError, "give a list of JSON, or a value a line")
                unit = {"lines": "line", "list": "element", "csv": "row"}.get(kind, "")
                reader = {"lines": _lines, "list": _elements, "csv": _rows, "text": _text}[kind]
                yield from grouped(path, unit, reader(stream, source), before)
        except UnicodeDecodeError as error:
            raise source.refusal(f"is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def grouped(path: Path, unit: str, records: Iterator[Record], before: int = 0) -> Iterator[RecordPiece]:
    """Records of one file as pieces; `before`: bytes of the files before it. Raises what `records` raises, after the
    piece of what stands before."""
    numbers: list[int] = []
    kept: list[Any] = []
    num_bytes = position = 0
    broken: Exception | None = None
    try:
        for number, record, size, position in records:
            numbers.append(number)
            kept.append(record)
            num_bytes += size
            if num_bytes >= PIECE_BYTES:
                yield RecordPiece(str(path), unit, numbers, kept, before + position)
                numbers, kept, num_bytes = [], [], 0
    except Exception as error:  # where the file breaks off, what stands before is kept
        broken = error
    if kept:
        yield RecordPiece(str(path), unit, numbers, kept, before + position)
    if broken is not None:
        raise broken


def _lines(stream: FileStream, source: Source) -> Iterator[Record]:
    """Lines that are not blank."""
    for number, line in enumerate(read_lines(stream.file, source), 1):
        if line.strip():
            yield number, line, len(line), stream.position()


def _text(stream: FileStream, source: Source) -> Iterator[Record]:
    most = _LARGEST_DOCUMENT_BYTES
    if stream.is_packed:
        most = min(most, max(MAX_BYTES, _MOST_EXPANSION * stream.num_bytes))
    content = stream.file.read(most + 1)
    if len(content) > most:
        raise source.refusal(f"has more than {most} bytes, which is the most of one document in such a file")
    yield 1, decoded(content, source), len(content), stream.position()


def _rows(stream: FileStream, source: Source) -> Iterator[Record]:
    """Rows of a table with commas, or with tabs, as dicts by the names in its first row, each with its line."""
    suffixes = [suffix.lower() for suffix in Path(source.where).suffixes[-2:]]
    rows = read_table(stream.file, source, delimiter="\t" if ".tsv" in suffixes else ",")
    _, names = next(rows, (0, None))
    if names is None:
        raise source.refusal("is empty: its first row must name the columns")
    for number, (_, row) in enumerate(rows, start=2):
        if not row:  # a blank line
            continue
        record: Any = dict(zip(names, row, strict=True)) if len(row) == len(names) else row
        yield number, record, sum(map(len, row)), stream.position()


def _begins_a_list(stream: FileStream) -> bool:
    """Whether the first character that is no blank opens a list; the position in the stream stays."""
    peeked = stream.file.peek(4096)  # type: ignore[attr-defined]
    return bool(peeked.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["))


def _elements(stream: FileStream, source: Source) -> Iterator[Record]:
    """The elements of one list, as JSON; a list of any length takes the memory of a few of them."""
    text = io.TextIOWrapper(stream.file, encoding="utf-8-sig")
    try:
        scanner = _Scanner(text, source)
        scanner.take("[")
        number = 0
        while scanner.next_character() != "]":
            if number:
                scanner.take(",")
            number += 1
            element = scanner.element(number).encode("utf-8", "surrogatepass")
            yield number, element, len(element), stream.position()
        scanner.take("]")
        if scanner.next_character():
            raise source.refusal("goes on after the end of its list")
    finally:
        text.detach()


class _Scanner:
    """Values one after the other, in a buffer that grows until it holds a whole one."""

    def __init__(self, text: io.TextIOWrapper, source: Source) -> None:
        self._text, self._source = text, source
        self._buffer, self._at, self._is_all = "", 0, False
        self._decoder = json.JSONDecoder()

    def next_character(self) -> str:
        """The next character that is no blank; empty at the end."""
        while True:
            rest = self._buffer[self._at : self._at + 64]
            stripped = rest.lstrip(" \t\r\n")
            self._at += len(rest) - len(stripped)
            if stripped:
                return stripped[0]
            if self._at >= len(self._buffer) and not self._more():
                return ""

    def take(self, character: str) -> None:
        found = self.next_character()
        if found != character:
            raise self._source.refusal(
                f"is not a list of JSON: {repr(found) if found else 'its end'} stands where {character!r} should"
            )
        self._at += 1

    def element(self, number: int) -> str:
        """The text of the next value."""
        self.next_character()
        while True:
            problem = ""
            try:
                _, end = self._decoder.raw_decode(self._buffer, self._at)
                if end < len(self._buffer) or self._is_all:  # a number may go on
                    text = self._buffer[self._at : end]
                    self._at = end
                    return text
            except RecursionError:
                raise self._source.refusal(f"element {number} is nested too deep") from None
            except ValueError as error:
                problem = str(error)
            rest = len(self._buffer) - self._at
            too_long = rest > MAX_BYTES
            if rest > 2 * _CHUNK_CHARACTERS and sum(map(self._buffer.count, ",[{")) > MAX_VALUES:
                raise self._source.refusal(f"element {number} holds more than {MAX_VALUES} values", "split it")
            if too_long or self._is_all:
                end_of = f"has more than {MAX_BYTES} characters, or " if too_long else ""
                raise self._source.refusal(f"element {number} {end_of}is not JSON ({problem})", "repair the file")
            self._more()

    def _more(self) -> bool:
        """Read as much again as is left, so that a long value is scanned few times. False at the end."""
        rest = len(self._buffer) - self._at
        found = self._text.read(min(max(_CHUNK_CHARACTERS, rest), MAX_BYTES + 1))
        self._buffer, self._at = self._buffer[self._at :] + found, 0
        self._is_all = not found
        return bool(found)

"""Reads untrusted JSON, TOML, CSV and text files within limits, and refuses bad files with one message.

Python's parsers raise RecursionError for deep nesting and a plain ValueError for a number of 5,000 digits, and use as
much memory as a file needs. Here all of these, and files that cannot be read, raise the error that the caller chooses.
`memo.artifacts.fields` then checks the content against a dataclass.
"""

import codecs
import contextlib
import csv
import itertools
import json
import os
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from memo.artifacts.regular_file import open_regular
from memo.errors import RIGHTS, MemoError

MAX_BYTES = 64 << 20
"""Limit of one file or one line; the index of a model with 100,000 tensors has a sixth of it."""
MAX_TOML_BYTES = 256 << 10
"""Limit of a TOML file: tomllib's memory grows with the square of the parts of a key. A configuration has kilobytes."""
MAX_VALUES = 4_000_000
"""Limit of numbers, texts, lists and objects in one document; each takes up to 100 bytes, however short its text is."""
MAX_CELLS = 1_000_000
"""Limit of the cells in one row of a table."""
MAX_DEPTH = 64
"""Limit of nested lists and objects; the schemas of tools have about twenty levels."""
_TOO_DEEP = f"is nested more than {MAX_DEPTH} deep"
_SHOWN_CHARACTERS = 80
_LARGEST_SHOWN_BITS = 256
_NAMES_LISTED = 12


@dataclass(frozen=True)
class Source:
    """The source of a value, for errors with messages `{where}: {problem}: {remedy}`.

    Attributes:
        where: file, line or flag; "" if the name of the value is the name of its flag.
        error: the class of the error.
        remedy: the remedy if the file is damaged or of another kind.
    """

    where: str
    error: type[MemoError]
    remedy: str

    def refusal(self, problem: str, remedy: str = "") -> MemoError:
        """The error to raise; `remedy`, if given, replaces the source's remedy."""
        return self.error(": ".join(filter(None, [self.where, problem, remedy or self.remedy])))


def read_json(path: str | Path, source: Source, *, max_bytes: int = MAX_BYTES) -> Any:
    """The value of a JSON file in UTF-8. Raises source.error for other content or a file that cannot be read."""
    return parse_json(read_bytes(path, source, max_bytes=max_bytes), source)


def read_json_object(path: str | Path, source: Source) -> dict[str, Any]:
    """The object in a JSON file. Raises the errors of `read_json`, and source.error for a value that is no object."""
    found = read_json(path, source)
    if not isinstance(found, dict):
        raise source.refusal(f"holds {kind_of(found)}, not an object")
    return found


def parse_json(content: bytes | str, source: Source, *, max_values: int = MAX_VALUES) -> Any:
    """The value of JSON in UTF-8; numbers may be NaN or infinite, as Python writes them.

    Raises source.error for text that is not JSON, is nested too deeply, has too many values, or has a key with two
    values.
    """
    text = content if isinstance(content, str) else decoded(content, source)
    most_values = 1 + text.count(",") + text.count("[") + text.count("{")
    if most_values > max_values:
        raise source.refusal(f"holds about {most_values} values, but {max_values} is the most that is read")
    try:
        found = json.loads(text, object_pairs_hook=_object)
    except RecursionError:
        raise source.refusal(_TOO_DEEP) from None
    except ValueError as error:
        raise source.refusal(f"is not JSON ({error})") from None
    _check_depth(found, source)
    return found


def read_toml(path: str | Path, source: Source) -> dict[str, Any]:
    """The document of a TOML file. Raises source.error for other content or a file that cannot be read."""
    text = decoded(read_bytes(path, source, max_bytes=MAX_TOML_BYTES), source)
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > MAX_DEPTH and not line.lstrip().startswith("#"):
            raise source.refusal(f"line {number} has more than {MAX_DEPTH} dots, which no key or number needs")
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise source.refusal(_TOO_DEEP) from None
    except ValueError as error:
        raise source.refusal(f"is not valid TOML ({error})") from None
    _check_depth(found, source)
    return found


def read_text(path: str | Path, source: Source, *, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file in UTF-8. Raises source.error for other content or a file that cannot be read."""
    return decoded(read_bytes(path, source, max_bytes=max_bytes), source)


def read_bytes(path: str | Path, source: Source, *, max_bytes: int = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `max_bytes`. Raises source.error for any other file."""
    with opened(path, source) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise source.refusal(f"has more than {max_bytes} bytes, which is the most that is read")
    return content


def read_lines(file: BinaryIO, source: Source, *, max_bytes: int = MAX_BYTES) -> Iterator[bytes]:
    """The lines of an open file of any length, each of at most `max_bytes`, with their ends. Raises source.error."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if len(line) > max_bytes:
            raise source.refusal(f"line {number} has more than {max_bytes} bytes", "split it")
        yield line


def read_table(
    file: BinaryIO, source: Source, *, delimiter: str = ",", strict: bool = False
) -> Iterator[tuple[int, list[str]]]:
    """Yield (number of the last line, cells) of each row of a table in UTF-8; no cells for a blank line. Cells may have
    line breaks.

    Raises source.error for a bad table, and for a row above MAX_BYTES or MAX_CELLS.
    """
    num_bytes = num_cells = 0

    def lines() -> Iterator[str]:
        nonlocal num_bytes, num_cells
        for number, line in enumerate(read_lines(file, source), 1):
            num_bytes += len(line)
            num_cells += line.count(delimiter.encode())
            if num_bytes > MAX_BYTES or num_cells > MAX_CELLS:
                raise source.refusal(
                    f"the row that ends in line {number} or later has more than {MAX_BYTES} bytes or {MAX_CELLS} "
                    "cells, which is the most that is read",
                    "split it",
                )
            for part in line.splitlines(keepends=True):  # lines of bytes end only with line breaks, carriage returns
                yield decoded(part, source) if number == 1 else _utf8(part, source)

    csv.field_size_limit(MAX_BYTES)
    rows = csv.reader(lines(), delimiter=delimiter, strict=strict)
    try:
        for row in rows:
            num_bytes = num_cells = 0
            yield rows.line_num, row
    except csv.Error as error:
        raise source.refusal(f"line {rows.line_num} is no CSV ({error})", "repair the table") from None


@contextlib.contextmanager
def opened(path: str | Path, source: Source) -> Iterator[BinaryIO]:
    """A context with an open regular file; errors of the file system become source.error."""
    try:
        file = open(open_regular(path), "rb")  # noqa: SIM115  closed below
    except FileNotFoundError:
        raise source.refusal("the file does not exist") from None
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        remedy = RIGHTS if isinstance(error, PermissionError) else ""
        raise source.refusal(f"cannot be read ({getattr(error, 'strerror', None) or error})", remedy) from None
    with file:
        try:
            yield file
        except OSError as error:
            raise source.refusal(f"cannot be read ({error.strerror or error})") from None


def is_there(path: str | Path) -> bool:
    """Whether something has the name `path`; false for a name that no file can have.

    Raises PermissionError if permissions hide the answer; os.path.exists would return false.
    """
    try:
        os.stat(path)
    except PermissionError:
        raise
    except (OSError, ValueError):
        return False
    return True


def shown(value: object) -> str:
    """A value for a message; long values are shortened."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _LARGEST_SHOWN_BITS:
        return f"a whole number of {value.bit_length()} bits"
    if isinstance(value, str | bytes):
        return repr(value) if len(value) <= _SHOWN_CHARACTERS else f"{value[:_SHOWN_CHARACTERS]!r}..."
    if isinstance(value, dict | list | tuple) and value:
        return f"{kind_of(value)} of {len(value)}"
    return repr(value)


def listed(names: Iterable[object]) -> str:
    """Names for a message; of many names only the first few."""
    found = [shown(name) for name in names]
    return ", ".join(found if len(found) <= _NAMES_LISTED else [*found[:_NAMES_LISTED], "..."])


def kind_of(value: object) -> str:
    """The kind of a value, in JSON's terms."""
    if value is None:
        return "null"
    kinds = {bool: "a boolean", int: "a whole number", float: "a number", str: "a string"}
    kinds |= {list: "a list", tuple: "a list", dict: "an object"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def decoded(content: bytes, source: Source) -> str:
    """The text of a file or its beginning, without its byte order mark. Raises source.error."""
    return _utf8(content.removeprefix(codecs.BOM_UTF8), source)


def _utf8(content: bytes, source: Source) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise source.refusal(f"is not text in UTF-8 ({error.reason} at byte {error.start})") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object; raises ValueError for a key with two values, because readers may choose either."""
    found = dict(pairs)
    if len(found) != len(pairs):
        for key, value in pairs:
            if found[key] != value:
                raise ValueError(f"{shown(key)} stands twice in one object, as {shown(value)} and {shown(found[key])}")
    return found


def _check_depth(found: object, source: Source) -> None:
    """Raises source.error for a value nested too deeply for recursive code; checks level by level in a loop."""
    level: list[Any] = [found]
    for _ in range(MAX_DEPTH + 1):
        outer = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = list(itertools.chain.from_iterable(outer))
        if not level:
            return
    raise source.refusal(_TOO_DEEP)

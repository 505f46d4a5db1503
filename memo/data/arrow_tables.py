"""Rows of Parquet and Arrow files, some hundred at a time; Arrow's are what Hugging Face's datasets keep on disk."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memo.artifacts.reading import Source, listed
from memo.errors import ConfigError, DataError

_ROWS = 256
_FILE_MAGIC = b"ARROW1"

Record = tuple[int, Any, int, int]
"""Number in the file from 1, the record (of a table: values by column), bytes of it, bytes of the file that have been
read."""


def pyarrow(path: str, module: str = "pyarrow") -> Any:
    """The package pyarrow, or a module of it, to read `path`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed: run pip install 'memo-train[data]', or convert "
            'the file to lines of JSON such as {"text": "..."}'
        ) from None


def parquet_rows(path: Path, column: str | None) -> Iterator[Record]:
    """`column`: the only one that is needed; None for all. Raises DataError for a file that is damaged or lacks it."""
    parquet = pyarrow(str(path), "pyarrow.parquet")
    with _told(path), parquet.ParquetFile(path, memory_map=True) as file:
        columns = _columns(path, file.schema_arrow.names, column)
        batches = file.iter_batches(batch_size=_ROWS, columns=columns)
        yield from _rows(path, batches, file.metadata.num_rows)


def arrow_rows(path: Path, column: str | None) -> Iterator[Record]:
    """As `parquet_rows`, of a file or a stream of Arrow."""
    arrow, ipc = pyarrow(str(path)), pyarrow(str(path), "pyarrow.ipc")
    with _told(path), arrow.memory_map(str(path)) as mapped:
        is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        mapped.seek(0)
        reader = ipc.open_file(mapped) if is_file else ipc.open_stream(mapped)
        columns = _columns(path, reader.schema.names, column)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        narrow = (_validated(batch if columns is None else batch.select(columns)) for batch in batches)
        parts = (batch.slice(first, _ROWS) for batch in narrow for first in range(0, batch.num_rows, _ROWS))
        yield from _rows(path, parts, None, mapped)


def _validated(batch: Any) -> Any:
    """A batch whose offsets lie inside of it: Arrow maps files as they are, and a damaged one would end the process."""
    batch.validate(full=True)
    return batch


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of pyarrow become DataError."""
    arrow = pyarrow(str(path))
    try:
        yield
    except DataError:
        raise
    except (arrow.ArrowException, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: cannot be read ({words}): fetch or write it again") from None


def _columns(path: Path, names: list[str], column: str | None) -> list[str] | None:
    if column is None:
        return None
    if column not in names:
        source = Source(str(path), DataError, "name the one that holds texts with --json-key")
        raise source.refusal(f"no column {column!r}, found [{listed(names)}]")
    return [column]


def _rows(path: Path, batches: Any, num_rows: int | None, mapped: Any = None) -> Iterator[Record]:
    number, size = 0, path.stat().st_size
    for batch in batches:
        rows = batch.to_pylist()
        row_bytes = batch.nbytes // max(1, len(rows))
        for row in rows:
            number += 1
            done = mapped.tell() if num_rows is None else size * number // num_rows
            yield number, row, row_bytes, min(done, size)

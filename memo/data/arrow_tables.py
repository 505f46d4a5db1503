"""Rows of Parquet and Arrow files, some hundred at a time; Arrow's are what Hugging Face's datasets keep on disk."""

import contextlib
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memo.artifacts.memory_limit import address_space_bytes, limited_memory
from memo.artifacts.reading import MAX_BYTES, Source, listed, opened, shown
from memo.data.chat_forms import remedy_without_texts
from memo.errors import ConfigError, DataError

_ROWS = 256
_BATCH_BYTES = 32 << 20
_MEMORY_BYTES = 768 << 20
"""What reading may take beyond what the process has: a kilobyte of such a file can stand for gigabytes."""
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
    with _told(path), _limited(lambda: parquet.ParquetFile(path, memory_map=True)) as file:
        columns = _columns(path, file.schema_arrow.names, column)
        described = file.metadata
        row_bytes = sum(described.row_group(i).total_byte_size for i in range(described.num_row_groups))
        rows = max(1, min(_ROWS, _BATCH_BYTES * described.num_rows // max(1, row_bytes)))
        # Without threads, as one in which memory ends would end the process.
        batches = file.iter_batches(batch_size=rows, columns=columns, use_threads=False)
        yield from _rows(path, batches, described.num_rows)


def arrow_rows(path: Path, column: str | None) -> Iterator[Record]:
    """As `parquet_rows`, of a file or a stream of Arrow."""
    arrow, ipc = pyarrow(str(path)), pyarrow(str(path), "pyarrow.ipc")
    with _told(path), arrow.memory_map(str(path)) as mapped:
        is_file = mapped.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        mapped.seek(0)
        reader = _limited(lambda: ipc.open_file(mapped) if is_file else ipc.open_stream(mapped))
        columns = _columns(path, reader.schema.names, column)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
        narrow = (_validated(batch if columns is None else batch.select(columns)) for batch in batches)
        yield from _rows(path, narrow, None, mapped)


def _limited(act: Callable[[], Any]) -> Any:
    """What `act` returns. Raises MemoryError where that takes too much memory."""
    with limited_memory(address_space_bytes() + _MEMORY_BYTES):
        return act()


def _validated(batch: Any) -> Any:
    """A batch whose offsets lie inside of it: Arrow maps files as they are, and a damaged one would end the process."""
    batch.validate(full=True)
    return batch


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Errors of pyarrow become DataError."""
    arrow = pyarrow(str(path))
    try:
        with opened(path, Source(str(path), DataError, "give a file of a table")):
            pass  # pyarrow would wait for the other end of a named pipe
        yield
    except DataError:
        raise
    except MemoryError:
        raise DataError(
            f"{path}: takes more than {_MEMORY_BYTES >> 20} MiB of memory to read: a row is too large, or the file is "
            "damaged: split its rows, or fetch or write it again"
        ) from None
    except (arrow.ArrowException, OSError, ValueError) as error:
        words = " ".join(str(error).split())[:200]
        raise DataError(f"{path}: cannot be read ({words}): fetch or write it again") from None


def _columns(path: Path, names: list[str], column: str | None) -> list[str] | None:
    if column is None:
        return None
    if column not in names:
        remedy = remedy_without_texts(names, "name the one that holds texts with --json-key")
        raise Source(str(path), DataError, remedy).refusal(f"no column {column!r}, found [{listed(names)}]")
    return [column]


def _rows(path: Path, batches: Any, num_rows: int | None, mapped: Any = None) -> Iterator[Record]:
    number, size = 0, path.stat().st_size
    while (batch := _limited(lambda: next(batches, None))) is not None:
        _check_batch(path, batch)
        names, columns, mean_bytes = batch.schema.names, batch.columns, batch.nbytes // max(1, batch.num_rows)
        for i in range(batch.num_rows):
            number += 1
            row = {name: column[i].as_py() for name, column in zip(names, columns, strict=True)}
            row_bytes = max(mean_bytes, sum(len(text) for text in row.values() if isinstance(text, str | bytes)))
            done = mapped.tell() if num_rows is None else size * number // num_rows
            yield number, row, row_bytes, min(done, size)


def _check_batch(path: Path, batch: Any) -> None:
    """Raises DataError for a row that becomes too large as values of Python, where lack of memory ends the process."""
    source = Source(str(path), DataError, "write it again without it")
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if kind := _repeating(column.type, outermost=True):
            raise source.refusal(f"column {shown(name)} holds {kind} inside of others, which memo does not read")
    if batch.nbytes > MAX_BYTES:
        sizes = (sum(column.slice(i, 1).nbytes for column in batch.columns) for i in range(batch.num_rows))
        if (largest := max(sizes)) > MAX_BYTES:
            raise source.refusal(f"a row has {largest} bytes, but {MAX_BYTES} is the most that is read", "split it")


def _repeating(kind: Any, outermost: bool = False) -> str | None:
    """The type of values that may name one place many times, if there is one inside of others; None if there is none.

    In a column of its own each row names one.
    """
    words = str(kind)
    if not outermost and words.startswith(("dictionary<", "run_end_encoded<", "list_view<", "large_list_view<")):
        return words.partition("<")[0]
    return next(filter(None, (_repeating(kind.field(i).type) for i in range(kind.num_fields))), None)

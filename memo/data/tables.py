"""Reads rows of Parquet and Arrow files, some hundred at a time; Hugging Face's datasets stores Arrow files.

pyarrow reads them in place, as datasets does. memo does not use datasets itself: it contacts the network to count the
load of a local file, takes 2.6 times as long for Parquet, reads the text 007 of a CSV file as the number 7 and NA as
null, and refuses a line of JSON without its file and number.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memo.artifacts.memory_limit import limited_memory
from memo.errors import ConfigError

_ROWS, _ROWS_BYTES = 256, 32 << 20
"""The most rows, and about the most bytes, that become Python values at once."""
MEMORY_BYTES = 768 << 20
"""Limit of additional memory for reading: a kilobyte of a compressed table can stand for gigabytes."""

Record = tuple[int, Any, int]
"""Number in the file from 1, the record (in a table: {column: value}), and its bytes."""


def package(name: str, path: Path) -> Any:
    """Import a module of pyarrow, to read `path`. Raises ConfigError if it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed: run pip install 'memo-train[data]', or convert "
            'the file to lines of JSON such as {"text": "..."}'
        ) from None


def table_rows(mapped: Any, kind: str, path: Path, column: str | None) -> Iterator[Record]:
    """Yield rows of a Parquet file, or of an Arrow file or stream, as {column: value}."""
    if kind == "parquet":
        file = _limited(lambda: package("pyarrow.parquet", path).ParquetFile(mapped))
        columns, described = _columns(file.schema_arrow.names, column), file.metadata
        row_bytes = sum(described.row_group(i).total_byte_size for i in range(described.num_row_groups))
        num_rows = max(1, min(_ROWS, _ROWS_BYTES * described.num_rows // max(1, row_bytes)))
        # Without threads, because a thread that runs out of memory would end the process.
        batches = file.iter_batches(batch_size=num_rows, columns=columns, use_threads=False)
    else:
        ipc = package("pyarrow.ipc", path)
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = _limited(lambda: ipc.open_file(mapped) if is_file else ipc.open_stream(mapped))
        columns = _columns(reader.schema.names, column)
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches)) if is_file else reader
    number = 0
    while (batch := _limited(lambda: next(batches, None))) is not None:
        batch = batch if columns is None else batch.select(columns)
        batch.validate(full=True)  # offsets are mapped from the file, and damaged ones would end the process
        row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
        step = max(1, min(_ROWS, _ROWS_BYTES // row_bytes))
        for first in range(0, batch.num_rows, step):
            for row in _limited(batch.slice(first, step).to_pylist):
                number += 1
                yield number, {name: _without_nulls(value) for name, value in row.items()}, row_bytes


def _columns(names: list[str], column: str | None) -> list[str] | None:
    return [column] if column in names else None


def _limited(act: Callable[[], Any]) -> Any:
    """Return act(). Raises MemoryError if it takes too much memory."""
    with limited_memory(MEMORY_BYTES):
        return act()


def _without_nulls(value: Any) -> Any:
    """A value without null fields: a row of a table has a null for each field that only other rows use."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value

"""Rows of Parquet and Arrow files, some hundred at a time; Arrow's are what Hugging Face's datasets keep on disk.

They are read with pyarrow, as datasets reads them, but in place. datasets itself asks the network to count that a file
of this disk is loaded, takes 2.6 times as long for Parquet, reads the text 007 of a CSV file as the number 7 and NA as
null, and refuses a line of JSON without its file and number.
"""

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from memo.artifacts.memory_limit import address_space_bytes, limited_memory
from memo.errors import ConfigError

_ROWS, _ROWS_BYTES = 256, 32 << 20
"""Rows that become values of Python together, and about how many bytes of them."""
MEMORY_BYTES = 768 << 20
"""What these may take beyond what the process has: a kilobyte of such a file can stand for gigabytes."""

Record = tuple[int, Any, int]
"""Number in the file from 1, the record (of a table: values by column), and its bytes."""


def package(name: str, path: Path) -> Any:
    """A module of pyarrow, to read `path`. Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise ConfigError(
            f"{path} needs the package pyarrow, which is not installed: run pip install 'memo-train[data]', or convert "
            'the file to lines of JSON such as {"text": "..."}'
        ) from None


def table_rows(mapped: Any, kind: str, path: Path, column: str | None) -> Iterator[Record]:
    """Rows of a Parquet file, or of a file or stream of Arrow, as dicts by column."""
    if kind == "parquet":
        file = _limited(lambda: package("pyarrow.parquet", path).ParquetFile(mapped))
        columns, described = _columns(file.schema_arrow.names, column), file.metadata
        row_bytes = sum(described.row_group(i).total_byte_size for i in range(described.num_row_groups))
        num_rows = max(1, min(_ROWS, _ROWS_BYTES * described.num_rows // max(1, row_bytes)))
        # Without threads, as one in which memory ends would end the process.
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
        batch.validate(full=True)  # its offsets are mapped as they are, and damaged ones would end the process
        row_bytes = max(1, batch.nbytes // max(1, batch.num_rows))
        step = max(1, min(_ROWS, _ROWS_BYTES // row_bytes))
        for first in range(0, batch.num_rows, step):
            for row in _limited(batch.slice(first, step).to_pylist):
                number += 1
                yield number, {name: _without_nulls(value) for name, value in row.items()}, row_bytes


def _columns(names: list[str], column: str | None) -> list[str] | None:
    return [column] if column in names else None


def _limited(act: Callable[[], Any]) -> Any:
    """What `act` returns. Raises MemoryError where that takes too much memory."""
    with limited_memory(address_space_bytes() + MEMORY_BYTES):
        return act()


def _without_nulls(value: Any) -> Any:
    """A value without the fields that are null: a row of a table has a null for each field that only other rows use."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value

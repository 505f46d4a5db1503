"""Small files that stand for large ones: each is read, or refused by one message, within 1 GiB more than before."""

import gzip
import os
import re
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from documents import read_documents
from ranks import run_ranks

from memo.artifacts.run_log import RunLog
from memo.checkpoint.index import from_json
from memo.cli import estimate
from memo.data import records, tables
from memo.data.indexed import MAGIC, IndexedDataset
from memo.errors import CheckpointError, DataError, MemoError
from memo.planner.memory.minimalloc import read_csv

MIB = 1 << 20


def parquet(path: Path) -> None:
    """12 rows of 4 MiB."""
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": ["a" * 4 * MIB]})
    with pyarrow.parquet.ParquetWriter(path, table.schema, compression="zstd", use_dictionary=False) as out:
        for _ in range(12):
            out.write_table(table)


def nested(path: Path) -> None:
    """One row, a list that names a text of 4 MiB 30 times."""
    import pyarrow

    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 30), pyarrow.array(["a" * 4 * MIB]))
    table = pyarrow.table({"text": pyarrow.ListArray.from_arrays(pyarrow.array([0, 30], pyarrow.int32()), values)})
    with pyarrow.ipc.new_file(str(path), table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)


def arrow(path: Path) -> None:
    """One row of 64 MiB."""
    import pyarrow

    buffers = [None, pyarrow.py_buffer(np.array([0, 64 * MIB], "<i4")), pyarrow.py_buffer(bytes(64 * MIB))]
    table = pyarrow.table({"text": pyarrow.Array.from_buffers(pyarrow.string(), 1, buffers)})
    with pyarrow.ipc.new_file(str(path), table.schema, options=pyarrow.ipc.IpcWriteOptions(compression="zstd")) as out:
        out.write_table(table)


def packed(begin: bytes, middle: bytes, times: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        with gzip.open(path, "wb", compresslevel=1) as file:
            file.write(begin)
            for _ in range(times):
                file.write(middle * (MIB // len(middle)))

    return write


def sparse(num_bytes: int, begin: bytes = b"") -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_bytes(begin)
        os.truncate(path, num_bytes)

    return write


DOCUMENTS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "parquet": ("a.parquet", parquet, "^12 documents$"),
    "nested arrow": ("a.arrow", nested, "takes more than 40 MiB of memory to read"),
    "arrow": ("a.arrow", arrow, "takes more than 40 MiB of memory to read"),
    "csv.gz": ("a.csv.gz", packed(b"", b",", 65), "has more than 67108864 bytes"),
    "cells of csv.gz": ("a.csv.gz", packed(b"", b",", 2), "or 1000000 cells, which is the most that is read"),
    "cell of csv.gz": ("a.csv.gz", packed(b'"', b"a", 65), "has more than 67108864 bytes"),
    "element": ("a.json.gz", packed(b"[[", b"[],", 8), "element 1 has more than .* or 4000000 values"),
    "long element": ("a.json.gz", packed(b'["\xf0\x9f\x98\x80', b"a", 65), "element 1 has more than 67108864 char"),
    "line": ("a.jsonl.gz", packed(b'"', b"a", 65), "line 1 has more than 67108864 bytes"),
    "text": ("a.txt.gz", packed(b"", b"a", 66), "has more than .* bytes, which is the most of one document in such"),
    "sparse lines": ("a.jsonl", sparse(200 << 30), "line 1 has more than 67108864 bytes"),
    "sparse table": ("a.csv", sparse(200 << 30), "line 1 has more than 67108864 bytes"),
    "sparse list": ("a.json", sparse(200 << 30, b"["), "element 1 has more than 67108864 characters or"),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_documents_that_expand_are_bounded(tmp_path: Path, kind: str) -> None:
    """In a fresh process: what another test has freed would be given out again, and no limit would be met."""
    name, write, message = DOCUMENTS[kind]
    write(tmp_path / name)
    (found,) = run_ranks(1, found_in, tmp_path / name)
    assert re.search(message, found), found[:300]
    assert "\n" not in found


def found_in(path: Path) -> str:
    """The number of documents, or the message, within 40 MiB of memory."""
    tables.MEMORY_BYTES = records.MEMORY_BYTES = 40 * MIB
    tables._ROWS_BYTES = MIB
    try:
        return f"{len(read_documents([path], 'text'))} documents"
    except MemoError as error:
        return str(error)


def test_an_index_takes_memory_by_its_size() -> None:
    with pytest.raises(CheckpointError, match=r"index.json: holds about \d+ values, but \d+ is the most that is read"):
        from_json(b'{"schema":[' + b"[]," * 100_000 + b"[]]}")


def header(num_sequences: int, num_bounds: int) -> bytes:
    return struct.pack("<9sQBQQ", MAGIC, 1, 8, num_sequences, num_bounds)


def test_a_sparse_index_of_a_corpus_is_not_read(tmp_path: Path) -> None:
    num = 10 * 10**9
    sparse(34 + 12 * num + 8 * (num + 1), header(num, num + 1))(tmp_path / "c.idx")
    (tmp_path / "c.bin").write_bytes(bytes(100))
    with pytest.raises(DataError, match=r"has 10000000000 sequences and .*, but its .bin file only 100 bytes"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.parametrize("bounds", [(0, 2**62, -(2**62), 2), (0, 7, 1, 2), (0, -5, 1, 2), (0, 9, 9, 9)])
def test_bounds_of_documents_beyond_the_file_are_refused(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    """The difference of the first two is no number of 64 bits."""
    arrays = np.array([1, 1], "<i4").tobytes() + np.array([0, 2, *bounds], "<i8").tobytes()
    (tmp_path / "c.idx").write_bytes(header(2, len(bounds)) + arrays)
    (tmp_path / "c.bin").write_bytes(bytes(4))
    with pytest.raises(DataError, match="document bounds must rise from 0 to 2"):
        IndexedDataset(tmp_path / "c")


def cases(path: str, out: str) -> None:
    estimate.main(["--cases", path, "--out", out])


def test_a_long_table_of_cases_takes_the_memory_of_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as they are answered, so none waits for the others."""
    evaluate = estimate.answer
    (tmp_path / "in.csv").write_text("model,seq_len\n" + "gpt-7b,4096\n" * 3 + "gpt-7b,none\n")
    asked: list[object] = []
    monkeypatch.setattr(estimate, "answer", lambda case, **how: asked.append(case) or evaluate(case, **how))
    rows = estimate._answered(tmp_path / "in.csv", estimate._Options())
    next(rows)
    assert "total_gib" in next(rows) and len(asked) == 1
    with pytest.raises(MemoError, match="line 5"):
        cases(str(tmp_path / "in.csv"), str(tmp_path / "out.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["in.csv"]


@pytest.mark.parametrize("read_table", [lambda path: cases(path, f"{path}.out"), read_csv], ids=["cases", "blocks"])
def test_a_sparse_table_is_refused(tmp_path: Path, read_table: Callable[[str], object]) -> None:
    sparse(200 << 30)(tmp_path / "in.csv")
    with pytest.raises(MemoError, match="line 1 has more than 67108864 bytes"):
        read_table(str(tmp_path / "in.csv"))


def test_a_long_log_is_read_line_by_line(tmp_path: Path) -> None:
    sparse(200 << 30, b"{}\n")(tmp_path / "log.jsonl")
    with pytest.raises(MemoError, match=r"line 1: has no field|line 2 has more than"):
        RunLog.load(tmp_path / "log.jsonl")

"""The .bin/.idx pair: exact bytes, round trips, refusals, and what a failed or killed build leaves behind."""

import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from documents import write_corpus

from memo.data.indexed import DTYPE_CODES, IndexedDataset, IndexedDatasetWriter, smallest_dtype
from memo.errors import DataError

DOCUMENTS = [[5, 6, 7], [8], [9, 10, 11, 300]]


def hand_made_index(dtype_code: int = 8, version: int = 1, magic: bytes = b"MMIDIDX\x00\x00") -> bytes:
    """The index of DOCUMENTS as uint16, spelled out field by field."""
    return (
        magic
        + struct.pack("<Q", version)
        + struct.pack("<B", dtype_code)
        + struct.pack("<Q", 3)
        + struct.pack("<Q", 4)
        + struct.pack("<3i", 3, 1, 4)
        + struct.pack("<3q", 0, 6, 8)
        + struct.pack("<4q", 0, 1, 2, 3)
    )


def test_files_are_byte_exact(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", DOCUMENTS)
    assert (tmp_path / "corpus.idx").read_bytes() == hand_made_index()
    assert (tmp_path / "corpus.bin").read_bytes() == struct.pack("<8H", 5, 6, 7, 8, 9, 10, 11, 300)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["corpus.bin", "corpus.idx"]


@pytest.mark.parametrize("code", DTYPE_CODES)
def test_round_trip_in_every_dtype(tmp_path: Path, code: int) -> None:
    dtype = DTYPE_CODES[code]
    documents = [[1, 2, 3], [4], [], [5, 127]]
    prefix = tmp_path / "deep" / "corpus.v1"  # a dot in the prefix is no suffix
    with IndexedDatasetWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add_document(np.array(document, dtype=dtype))
        assert (writer.num_documents, writer.num_tokens) == (4, 6)
    assert Path(f"{prefix}.idx").read_bytes()[17] == code
    dataset = IndexedDataset(prefix)
    assert dataset.dtype == dtype
    assert dataset.document_lengths.tolist() == [3, 1, 0, 2]
    assert [dataset[i].tolist() for i in range(len(dataset))] == documents


def test_dtype_codes_are_megatrons() -> None:
    names = {code: dtype.name for code, dtype in DTYPE_CODES.items()}
    assert names == {
        1: "uint8",
        2: "int8",
        3: "int16",
        4: "int32",
        5: "int64",
        6: "float64",
        7: "float32",
        8: "uint16",
    }
    assert smallest_dtype(65499).name == "uint16"
    assert smallest_dtype(65500).name == "int32"


def test_document_of_several_sequences(tmp_path: Path) -> None:
    """Megatron splits documents into sentences on request: documents (0, 1) and (2)."""
    write_corpus(tmp_path / "corpus", DOCUMENTS)
    index = bytearray(hand_made_index())
    struct.pack_into("<Q", index, 26, 3)
    index[-32:] = struct.pack("<3q", 0, 2, 3)
    (tmp_path / "corpus.idx").write_bytes(index)
    dataset = IndexedDataset(tmp_path / "corpus")
    assert [dataset[i].tolist() for i in range(len(dataset))] == [[5, 6, 7, 8], [9, 10, 11, 300]]


def test_index_out_of_range_and_read_only(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", DOCUMENTS)
    dataset = IndexedDataset(tmp_path / "corpus")
    for document in (-1, 3):
        with pytest.raises(IndexError, match=rf"document {document} .* has 3"):
            dataset[document]
    with pytest.raises(ValueError, match="read-only"):
        dataset[0][0] = 1


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (hand_made_index(magic=b"TNTIDX\x00\x00\x00"), r"corpus.idx begins with b'TNTIDX.*MMIDIDX"),
        (b"", r"corpus.idx begins with b''"),
        (hand_made_index()[:20], r"corpus.idx has 20 bytes, its header alone 34"),
        (hand_made_index(version=2), r"version 2, this reader knows 1"),
        (hand_made_index(dtype_code=9), r"dtype code 9, known are \[1, 2, 3, 4, 5, 6, 7, 8\]"),
        (hand_made_index()[:-1], r"corpus.idx has 101 bytes.*need 102"),
        (hand_made_index() + b"\x00\x00\x00", r"corpus.idx has 105 bytes.*need 102"),
        (hand_made_index(dtype_code=4), r"lengths and pointers disagree"),
        (
            hand_made_index()[:34] + struct.pack("<3i3q", 3, -1, 6, 0, 6, 4) + hand_made_index()[-32:],
            r"lengths and pointers disagree",
        ),
        (hand_made_index()[:-8] + struct.pack("<q", 2), r"must rise from 0 to 3"),
        (hand_made_index()[:-24] + struct.pack("<3q", 2, 1, 3), r"must rise from 0 to 3"),
    ],
)
def test_foreign_and_truncated_indices_are_refused(tmp_path: Path, index: bytes, message: str) -> None:
    write_corpus(tmp_path / "corpus", DOCUMENTS)
    (tmp_path / "corpus.idx").write_bytes(index)
    with pytest.raises(DataError, match=message):
        IndexedDataset(tmp_path / "corpus")


def test_truncated_and_missing_bin_are_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", DOCUMENTS)
    path = tmp_path / "corpus.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"corpus.bin has 14 bytes, but .*corpus.idx describes 16"):
        IndexedDataset(tmp_path / "corpus")
    path.unlink()
    with pytest.raises(DataError, match=r"corpus.bin does not exist"):
        IndexedDataset(tmp_path / "corpus")


def test_dataset_without_tokens_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", [[]])
    with pytest.raises(DataError, match="0 bytes"):
        IndexedDataset(tmp_path / "corpus")


@pytest.mark.parametrize(
    ("dtype", "document", "message"),
    [
        ("<u2", np.array([1, 65536]), "from 1 to 65536, which do not fit into uint16"),
        ("<u2", np.array([-1, 5]), "from -1 to 5"),
        ("<u2", np.array([[1], [2]]), r"shape \(2, 1\)"),
        ("<c8", np.array([1]), "complex64 cannot be stored"),
    ],
)
def test_writer_refuses_what_would_be_damaged(tmp_path: Path, dtype: str, document: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message), IndexedDatasetWriter(tmp_path / "corpus", dtype) as writer:
        writer.add_document(document)
    assert list(tmp_path.iterdir()) == []


def test_failed_build_keeps_the_older_dataset(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus", DOCUMENTS)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RuntimeError), IndexedDatasetWriter(tmp_path / "corpus", "<u2") as writer:
        writer.add_document([1, 2])
        writer.add_side_file(".json", b"{}")
        raise RuntimeError
    with (
        pytest.raises(DataError, match=r"no documents for .*corpus"),
        IndexedDatasetWriter(tmp_path / "corpus", "<u2"),
    ):
        pass
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


KILLED_WRITER = """
import os, signal, sys
from memo.data.indexed import IndexedDatasetWriter

victim = sys.argv[2]
replace = os.replace

def replace_or_die(source, target):
    if str(target).endswith(victim):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = replace_or_die
with IndexedDatasetWriter(sys.argv[1], "<u2") as writer:
    writer.add_document([1] * 100_000)
    if victim == "body":
        os.kill(os.getpid(), signal.SIGKILL)
    writer.add_side_file(".json", b"{}")
"""


@pytest.mark.parametrize("victim", ["body", ".bin", ".json", ".idx"])
@pytest.mark.parametrize("older", [False, True])
def test_killed_writer_leaves_no_mixture(tmp_path: Path, victim: str, older: bool) -> None:
    """Killed while streaming, or just before any of the final moves."""
    if older:
        write_corpus(tmp_path / "corpus", DOCUMENTS)
    root = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", KILLED_WRITER, str(tmp_path / "corpus"), victim]
    assert subprocess.run(command, cwd=root, check=False).returncode == -signal.SIGKILL
    if older and victim == "body":
        assert IndexedDataset(tmp_path / "corpus")[0].tolist() == DOCUMENTS[0]
    else:
        with pytest.raises(DataError, match=r"corpus\.idx does not exist"):
            IndexedDataset(tmp_path / "corpus")
    write_corpus(tmp_path / "corpus", DOCUMENTS)  # what a killed build left is no obstacle for the next
    assert len(IndexedDataset(tmp_path / "corpus")) == 3

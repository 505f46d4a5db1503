"""The files that people have: packed, in lists and in tables, and what happens to those that cannot be read."""

import bz2
import csv
import gzip
import json
import lzma
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import read_conversations, read_documents

from memo.artifacts.processes import process_start
from memo.cli.main import main
from memo.data import corpus_builder as build_module
from memo.data import records
from memo.data.corpus_builder import Reading, build_corpus
from memo.data.encode import Encoded, encode_all
from memo.data.indexed import IndexedDataset
from memo.data.tokenizer import train_bpe
from memo.errors import ConfigError, DataError

pyarrow = pytest.importorskip("pyarrow")
TEXTS = ["first\r\nline", 'Größe, 日本 "q"', "", "tab\tand\\", "last 🦙"]


def as_lines(texts: list[Any]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def write_table(path: Path, texts: list[Any], **columns: list[Any]) -> Path:
    """Parquet, or Arrow as datasets keeps it: a stream; `.file.arrow`: Arrow's own files. Two batches each."""
    import pyarrow.ipc
    import pyarrow.parquet

    table = pyarrow.table({"id": list(range(len(texts))), "text": texts, **columns})
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, row_group_size=3)
    else:
        new = pyarrow.ipc.new_file if ".file" in path.suffixes else pyarrow.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
    return path


def zstandard(content: bytes) -> bytes:
    half = len(content) // 2
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (content[:half], content[half:]))


def write_csv(path: Path, texts: list[str], delimiter: str = ",") -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        csv.writer(file, delimiter=delimiter).writerows([("id", "text"), *((i, text) for i, text in enumerate(texts))])
    return path


WRITERS: dict[str, Callable[[Path], object]] = {
    "a.jsonl": lambda path: path.write_bytes(as_lines(TEXTS)),
    "a.ndjson": lambda path: path.write_bytes(as_lines(TEXTS)),
    "a.jsonl.gz": lambda path: path.write_bytes(
        gzip.compress(as_lines(TEXTS[:2])) + gzip.compress(as_lines(TEXTS[2:]))
    ),
    "a.JSONL.GZ": lambda path: path.write_bytes(gzip.compress(as_lines(TEXTS))),
    "a.jsonl.zst": lambda path: path.write_bytes(zstandard(as_lines(TEXTS))),
    "a.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(as_lines(TEXTS))),
    "a.jsonl.xz": lambda path: path.write_bytes(lzma.compress(as_lines(TEXTS))),
    "list.json": lambda path: path.write_text(json.dumps([{"text": text, "n": [1]} for text in TEXTS], indent=1)),
    "texts.json": lambda path: path.write_text("\n " + json.dumps(TEXTS, ensure_ascii=False), encoding="utf-8"),
    "list.json.gz": lambda path: path.write_bytes(gzip.compress(json.dumps(TEXTS).encode("utf-8-sig"))),
    "lines.json": lambda path: path.write_bytes(as_lines(TEXTS)),
    "a.csv": lambda path: write_csv(path, TEXTS),
    "a.tsv": lambda path: write_csv(path, TEXTS, "\t"),
    "a.csv.gz": lambda path: path.write_bytes(gzip.compress(write_csv(path.with_suffix(".x"), TEXTS).read_bytes())),
    "a.parquet": lambda path: write_table(path, TEXTS),
    "a.arrow": lambda path: write_table(path, TEXTS),
    "a.file.arrow": lambda path: write_table(path, TEXTS),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("piece_bytes", [1, 1 << 20])
def test_every_kind_of_file_holds_the_same_documents(
    name: str, piece_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(records, "_CHUNK_CHARACTERS", 7)  # an element of a list is read in parts
    WRITERS[name](tmp_path / name)
    assert list(read_documents([tmp_path / name], "text")) == TEXTS
    last = list(records.read_pieces([tmp_path / name], "text"))[-1]
    assert last.done_bytes <= (tmp_path / name).stat().st_size


def test_a_packed_text_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"line\nline\n"))
    assert list(read_documents([tmp_path / "a.txt.gz"], "text")) == ["line\nline\n"]


def test_what_save_to_disk_wrote(tmp_path: Path) -> None:
    """A data set in two files, and one of splits."""
    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    write_table(folder / "data-00000-of-00002.arrow", TEXTS[:2])
    write_table(folder / "data-00001-of-00002.arrow", TEXTS[2:])
    write_table(folder / "cache-1.arrow", ["of a map that was tried"])
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")
    build_corpus([folder], tmp_path / "out" / "a", append_eod=False)
    corpus = IndexedDataset(tmp_path / "out" / "a")
    assert [bytes(corpus[i].astype(np.uint8)).decode() for i in range(len(corpus))] == [text for text in TEXTS if text]
    (tmp_path / "set" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert build_corpus([tmp_path / "set"], tmp_path / "out" / "b").train.num_documents == 4
    (tmp_path / "set" / "test").mkdir()
    (tmp_path / "set" / "test" / "state.json").write_text("{}")
    with pytest.raises(DataError, match=r"set is a data set of 2 splits; name those to read: .*set/test .*set/train$"):
        build_corpus([tmp_path / "set"], tmp_path / "out" / "b")


def test_a_folder_of_the_hub(tmp_path: Path) -> None:
    """Tables are taken, what tells of them is not, and what else lies there is counted and named on one line."""
    folder = tmp_path / "fineweb"
    (folder / "data").mkdir(parents=True)
    write_table(folder / "data" / "train-0.parquet", ["a"])
    write_table(folder / "data" / "train-1.parquet", ["b"])
    (folder / "README.md").write_text("about it")
    for name in ("__pycache__", "data/__pycache__", ".cache"):
        (folder / name).mkdir()
        (folder / name / "module.py").write_text("neither read nor counted")
        (folder / name / "module.cpython-312.pyc").write_bytes(b"\0")
    (folder / "dataset_infos.json").write_text("{}")
    (folder / "pic\x1b[2J\nture.png").write_bytes(b"\x89")
    summary = build_corpus([folder], tmp_path / "out" / "a")
    assert summary.train.num_documents == 2
    named = rf"{folder}/README.md, {folder}/pic\x1b[2J\nture.png"
    assert summary.left_out == (f"left out 2 files of other kinds: {named}",)


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        (
            "a.jsonl.gz",
            gzip.compress(as_lines(TEXTS), mtime=0)[:-20],
            "a.jsonl.gz: cannot be read (Compressed file",
        ),
        ("a.jsonl.gz", b"no gzip", "a.jsonl.gz: cannot be read (Not a gzipped file"),
        ("a.jsonl.xz", b"no xz", "a.jsonl.xz: cannot be read"),
        ("a.jsonl.zst", b"no zstandard", "a.jsonl.zst: cannot be read"),
        ("a.parquet", b"PAR1", "a.parquet: cannot be read ("),
        ("a.arrow", b"ARROW1\0\0", "a.arrow: cannot be read ("),
        ("a.json", b'[{"text": "a"}, {"text": ', "a.json: element 2 is not JSON ("),
        ("a.json", b'[{"text": "a"} {"text": "b"}]', "a.json: is not a list of JSON: '{' stands where ',' should"),
        ("a.json", b'["a", "b"', "a.json: is not a list of JSON: its end stands where ',' should"),
        ("a.json", b'["a"] 5', "a.json: goes on after the end of its list"),
        ("a.json", b"[" * 100_000, "a.json: element 1 is nested too deep"),
        ("a.json", b'{\n "text": "a"\n}', "a.json, line 1: is not JSON"),
        ("a.csv", b"", "a.csv: is empty: its first row must name the columns"),
        ("a.csv", b"id,text\n1,a,b\n", "a.csv, row 2: 3 cells, but row 1 names 2 columns; put"),
        ("a.csv", b"id,body\n1,a\n", "a.csv, row 2: no string under the key 'text', found ['body', 'id']"),
        ("a.csv", b"id,text\n1,\xff\n", "a.csv: is not text in UTF-8 ("),
        ("a.txt.gz", gzip.compress(b"\xff", mtime=0), "a.txt.gz: is not text in UTF-8 ("),
    ],
    ids=lambda value: value if isinstance(value, str) else "",  # processes that share tests must name them alike
)
def test_files_that_cannot_be_read(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as refused:
        build_corpus([tmp_path / name], tmp_path / "out")
    assert f"{tmp_path}/{says}" in str(refused.value)
    assert str(refused.value).endswith("(--skip-unreadable of `memo data` leaves out what cannot be read)")
    (tmp_path / "b.txt").write_text("good")
    summary = build_corpus(
        [tmp_path / name, tmp_path / "b.txt"], tmp_path / "out", reading=Reading(skip_unreadable=True)
    )
    assert summary.left_out[0] == f"left out {3 if '{' in str(content[:1]) else 1} that could not be read:"
    assert f"{tmp_path}/{says}" in summary.left_out[1]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz", "a.json"])
def test_what_stands_before_a_break_is_kept(name: str, tmp_path: Path) -> None:
    """A file that was cut, as by a download that ended early, gives all of its whole records."""
    rng = np.random.default_rng(1)
    texts = [f"document {i} " + rng.bytes(40).hex() for i in range(300)]
    if name == "a.json":
        whole = json.dumps([{"text": text} for text in texts]).encode()
    elif name == "a.csv.gz":
        whole = gzip.compress("\n".join(["text", *texts]).encode(), mtime=0)
    else:
        whole = gzip.compress(as_lines(texts), mtime=0)
    (tmp_path / name).write_bytes(whole[: len(whole) * 2 // 3])
    told: list[str] = []
    found = list(read_documents([tmp_path / name], "text", lambda error: told.append(str(error))))
    assert 150 < len(found) < 250 and found == texts[: len(found)]
    assert len(told) == 1 and told[0].startswith(f"{tmp_path}/{name}: ")


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_tables_without_texts(suffix: str, tmp_path: Path) -> None:
    path = write_table(tmp_path / f"a.{suffix}", ["a", None, "c"], n=[1, 2, 3])
    with pytest.raises(DataError, match=r"row 1: no string under the key 'body', found \['id', 'n', 'text'\]; set"):
        list(read_documents([path], "body"))
    with pytest.raises(DataError, match=r"row 1: the key 'n' holds a whole number, not a string"):
        list(read_documents([path], "n"))
    with pytest.raises(DataError, match=r"row 2: the key 'text' holds null, not a string"):
        list(read_documents([path], "text"))
    assert len(list(read_documents([path], "text", lambda error: None))) == 2
    chats = write_table(tmp_path / f"b.{suffix}", ["a"], messages=[["x"]])
    with pytest.raises(DataError, match=r"row 1: no string .*; these are conversations, of which `memo data chat`"):
        list(read_documents([chats], "body"))


def test_what_is_left_out_is_counted_once_and_the_first_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [as_lines(["good text"]) if i % 2 else b'{"text": 5}\n' for i in range(20)]
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    command = ["data", "build", str(tmp_path / "a.jsonl"), str(tmp_path / "out"), "--skip-unreadable"]
    assert main([*command, "--tokenizer", "bpe", "--vocab-size", "260"]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[1] == "left out 10 that could not be read:"
    assert [line.partition(": ")[0] for line in told[2:7]] == [
        f"  {tmp_path}/a.jsonl, line {2 * i + 1}" for i in range(5)
    ]
    assert told[7] == "  and 5 more" and len(told) == 9


def test_a_missing_package_is_named_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    monkeypatch.setitem(sys.modules, "compression", None)
    for name in ("a.parquet", "a.arrow", "a.jsonl.zst"):
        (tmp_path / name).write_bytes(b"PAR1")
        with pytest.raises(
            ConfigError, match=rf"{name} needs the package pyarrow, .* run pip install 'memo-train\[data"
        ):
            build_corpus([tmp_path / name], tmp_path / "out", reading=Reading(skip_unreadable=True))


def test_conversations_of_lists_and_tables(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    (tmp_path / "a.json").write_text(json.dumps([{"messages": chat}, {"instruction": "q", "input": "", "output": "a"}]))
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(json.dumps({"messages": chat}).encode()))
    nulls = [[{**chat[0], "name": None}, {**chat[1], "name": "x"}]]
    write_table(tmp_path / "c.parquet", ["t"], messages=nulls, instruction=[None], output=[None])
    found = list(read_conversations([tmp_path / name for name in ("a.json", "b.jsonl.gz", "c.parquet")]))
    assert [list(each.messages) for each in found[:3]] == [chat] * 3
    assert list(found[3].messages) == [chat[0], {**chat[1], "name": "x"}]
    assert found[1].where == f"{tmp_path}/a.json, element 2" and found[3].where == f"{tmp_path}/c.parquet, row 1"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_bpe(["some words and more words"], 270, folder / "tokenizer.json")
    return folder


def test_workers_change_nothing(tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes, many pieces; with lines that cannot be read."""
    monkeypatch.setattr(records, "PIECE_BYTES", 300)
    monkeypatch.setattr(build_module, "_WORKERS_FROM_BYTES", 0)
    lines = [as_lines([f"words and more {i} " * (i % 7)]) for i in range(200)]
    lines[50] = b"no JSON\n"
    (tmp_path / "a.jsonl").write_bytes(b"".join(lines))
    for name, workers in (("one", 1), ("two", 2)):
        reading = Reading(workers=workers, skip_unreadable=True)
        summary = build_corpus(
            [tmp_path / "a.jsonl"], tmp_path / name, tokenizer=str(tokenizer), split_eval=0.3, reading=reading
        )
        assert summary.num_empty_documents == 29 and "line 51: is not JSON" in summary.left_out[1]
    for suffix in (".bin", ".idx", "-eval.bin", "-eval.idx"):
        assert Path(f"{tmp_path}/one{suffix}").read_bytes() == Path(f"{tmp_path}/two{suffix}").read_bytes()
    with pytest.raises(DataError, match=r"a.jsonl, line 51: is not JSON.* \(--skip-unreadable of `memo data`"):
        build_corpus([tmp_path / "a.jsonl"], tmp_path / "three", tokenizer=str(tokenizer), reading=Reading(workers=2))
    assert not list(tmp_path.glob("three*"))


PIECE = records.RecordPiece("a.jsonl", "line", [1], [b'{"text": "a"}'])


def test_a_process_that_ends_is_told() -> None:
    def die(piece: records.RecordPiece) -> Encoded:
        os._exit(1)

    with pytest.raises(DataError, match=r"^a process that tokenizes has ended, perhaps for want of memory: give fewer"):
        list(encode_all([PIECE] * 9, die, 2))


def test_processes_end_with_a_parent_that_is_killed() -> None:
    """Nobody else would end them."""
    program = (
        "import os, time; from memo.data import encode; from memo.data.records import RecordPiece;"
        "tell = lambda piece: os.write(1, b'%d\\n' % os.getpid()) and time.sleep(600);"
        "list(encode.encode_all([RecordPiece('a', '', [1], ['a'])] * 2, tell, 2))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 60
    while any(map(process_start, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [process_start(child) for child in children] == ["", ""]


def test_a_damaged_table_of_arrow_is_refused_and_ends_no_process(tmp_path: Path) -> None:
    """Where its texts begin and end is not believed: pyarrow reads memory outside of the file otherwise."""
    path = write_table(tmp_path / "a.arrow", ["one", "two", "three"])
    content = path.read_bytes()
    offsets = np.array([0, 3, 6, 11], dtype="<i4").tobytes()
    assert content.count(offsets) == 1
    for wrong in ([0, 3, 6, 2**30], [0, 2**31 - 1, 6, 11], [0, -5, 6, 11], [9, 3, 6, 11]):
        path.write_bytes(content.replace(offsets, np.array(wrong, dtype="<i4").tobytes()))
        with pytest.raises(DataError, match=r"a.arrow: cannot be read \("):
            list(read_documents([path], "text"))

"""From files to a corpus and back to text."""

import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from memo.data import corpus_builder as build_module
from memo.data import records as records_module
from memo.data.corpus_builder import build_corpus, build_demo
from memo.data.facts import CorpusFacts, load_corpus_tokenizer
from memo.data.indexed import IndexedDataset
from memo.data.tokenizer import train_bpe
from memo.errors import ConfigError, DataError


def texts_of(prefix: Path) -> list[str]:
    """Every document, decoded with the tokenizer that lies beside the corpus; each ends with its only eod."""
    tokenizer = load_corpus_tokenizer(prefix)
    corpus = IndexedDataset(prefix)
    texts = []
    for index in range(len(corpus)):
        assert np.flatnonzero(corpus[index] == tokenizer.eod).tolist() == [len(corpus[index]) - 1]
        texts.append(tokenizer.decode(corpus[index]))
    return texts


def write_lines(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text, "other": 1}) + "\n" for text in texts))
    return path


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A folder with a bit of everything."""
    folder = tmp_path / "sources"
    (folder / "sub").mkdir(parents=True)
    (folder / ".hidden").mkdir()
    (folder / "b.txt").write_bytes("Größe\r\n".encode())
    (folder / "a.md").write_bytes(b"\xef\xbb\xbfbyte order mark")
    (folder / "sub" / "z.py").write_text("print('日本')\n", encoding="utf-8")
    (folder / "image.png").write_bytes(b"\x89PNG\xff")
    (folder / ".hidden" / "c.txt").write_text("hidden")
    write_lines(folder / "m.jsonl", ["first line", "", "<|endoftext|> spelled out"])
    return folder


EXPECTED = ["byte order mark", "Größe\r\n", "first line", "<|endoftext|> spelled out", "print('日本')\n"]


def test_build_from_a_directory(sources: Path, tmp_path: Path) -> None:
    summary = build_corpus([sources], tmp_path / "out" / "corpus")
    assert texts_of(tmp_path / "out" / "corpus") == EXPECTED
    assert summary.num_empty_documents == 1
    assert summary.evaluation is None
    num_tokens = sum(len(text.encode()) + 1 for text in EXPECTED)
    assert summary.train == CorpusFacts("byte", 257, 256, len(EXPECTED), num_tokens)
    assert CorpusFacts.load(tmp_path / "out" / "corpus") == summary.train
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "corpus.bin",
        "corpus.idx",
        "corpus.json",
    ]


def test_build_with_a_new_bpe_is_self_contained(sources: Path, tmp_path: Path) -> None:
    summary = build_corpus([sources], tmp_path / "out" / "corpus", tokenizer="bpe", vocab_size=270)
    assert (summary.train.tokenizer, summary.train.vocab_size) == ("corpus-tokenizer.json", 270)
    moved = (tmp_path / "out").rename(tmp_path / "moved")
    assert texts_of(moved / "corpus") == EXPECTED


def test_build_with_a_given_bpe(sources: Path, tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir()
    train_bpe(EXPECTED, 265, given / "tokenizer.json")
    build_corpus([sources], tmp_path / "corpus", tokenizer=str(given), split_eval=0.5)
    (given / "tokenizer.json").unlink()
    assert sorted(texts_of(tmp_path / "corpus") + texts_of(tmp_path / "corpus-eval")) == sorted(EXPECTED)


def test_inputs_keep_their_order(tmp_path: Path) -> None:
    files = [tmp_path / "z.unusual", write_lines(tmp_path / "a.jsonl", ["2", "3"], key="content")]
    files[0].write_text("1")
    build_corpus(files, tmp_path / "corpus", json_key="content", append_eod=False)
    corpus = IndexedDataset(tmp_path / "corpus")
    assert [corpus[index].tolist() for index in range(len(corpus))] == [[49], [50], [51]]


@pytest.mark.parametrize("batch_characters", [1, 50, 1 << 22])
def test_split_is_whole_documents_and_repeatable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_characters: int
) -> None:
    monkeypatch.setattr(records_module, "PIECE_BYTES", batch_characters)
    texts = [f"document {index}" for index in range(400)]
    lines = write_lines(tmp_path / "lines.jsonl", texts)
    summary = build_corpus([lines], tmp_path / "corpus", split_eval=0.1)
    train, held_out = texts_of(tmp_path / "corpus"), texts_of(tmp_path / "corpus-eval")
    assert sorted(train + held_out) == sorted(texts)
    assert 20 <= len(held_out) <= 60
    assert summary.evaluation is not None
    assert summary.evaluation.num_documents == len(held_out)
    # Documents that come later do not change the choice among those before.
    write_lines(tmp_path / "lines.jsonl", texts[:300])
    build_corpus([lines], tmp_path / "corpus", split_eval=0.1)
    assert texts_of(tmp_path / "corpus-eval") == [text for text in held_out if text in texts[:300]]


def test_failed_build_keeps_the_older_corpus(sources: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "corpus"
    build_corpus([sources], prefix, tokenizer="bpe", vocab_size=270)
    before = {path.name: path.read_bytes() for path in prefix.parent.iterdir()}
    (sources / "zz.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"zz.txt: is not text in UTF-8"):
        build_corpus([sources], prefix)
    assert {path.name: path.read_bytes() for path in prefix.parent.iterdir()} == before


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """A write beyond it fails with an OSError, as on a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


@pytest.mark.parametrize(
    ("document", "count", "limit_bytes", "suffix"),
    [
        ("x" * 20_000, 40, 100_000, ".bin"),  # amid the tokens
        ("x" * 20, 10, 100, ".bin"),  # all tokens wait in the buffer until the end
        ("x", 20, 90, ".json"),
        ("x", 50, 500, ".idx"),
    ],
    ids=["tokens", "last tokens", "facts", "index"],
)
def test_a_full_disk_is_told_by_file_and_leaves_no_half_corpus(
    tmp_path: Path, document: str, count: int, limit_bytes: int, suffix: str
) -> None:
    source = write_lines(tmp_path / "in.jsonl", [document] * count)
    folder, older = tmp_path / "out", write_lines(tmp_path / "older.jsonl", ["older"])
    build_corpus([older], folder / "corpus")
    expected = texts_of(folder / "corpus")
    names = sorted(path.name for path in folder.iterdir())
    message = rf"{folder}/corpus\{suffix} could not be written \(File too large\): check the path, its permis"
    with files_of_at_most(limit_bytes), pytest.raises(DataError, match=message):
        build_corpus([source], folder / "corpus", split_eval=0.2)
    assert sorted(path.name for path in folder.iterdir()) == names
    assert texts_of(folder / "corpus") == expected


def test_old_evaluation_corpus_is_not_trained_on_unseen(sources: Path, tmp_path: Path) -> None:
    build_corpus([sources], tmp_path / "corpus", split_eval=0.5)
    with pytest.raises(
        ConfigError, match=r"--eval-fraction \(split_eval in Python\) is 0, but .*corpus-eval.idx exists"
    ):
        build_corpus([sources], tmp_path / "corpus")


def test_facts_and_tokenizer_must_agree(sources: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "corpus"
    with pytest.raises(DataError, match=r"corpus.json: the file does not exist"):
        load_corpus_tokenizer(prefix)
    build_corpus([sources], prefix, tokenizer="bpe", vocab_size=270)
    train_bpe(EXPECTED, 260, tmp_path / "corpus-tokenizer.json")
    with pytest.raises(DataError, match=r"has vocab_size 260 and eod 0, but .*corpus.json says 270 and 0"):
        load_corpus_tokenizer(prefix)
    path = Path(f"{prefix}.json")
    for content in ("[]", "{", json.dumps({**json.loads(path.read_text()), "schema_version": 2})):
        path.write_text(content)
        with pytest.raises(DataError, match=r"corpus.json: .*build the corpus again"):
            load_corpus_tokenizer(prefix)


def test_demo_takes_the_sources_and_leaves_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = tmp_path / "lib"
    for name, content in (
        ("b.py", b"b = 1\n"),
        ("a/c.py", b"c = 2\r\n"),
        ("site-packages/torch.py", b"no\n"),
        ("a/latin.py", b"# \xe9\n"),
        ("notes.txt", b"no\n"),
    ):
        (library / name).parent.mkdir(parents=True, exist_ok=True)
        (library / name).write_bytes(content)
    (library / "site-packages/out").symlink_to(tmp_path)  # nobody looks into packages
    (library / "site-packages/out.py").symlink_to(__file__)
    monkeypatch.setattr(build_module, "standard_library", lambda: library)
    build_demo(tmp_path / "demo")
    assert texts_of(tmp_path / "demo") == ["c = 2\r\n", "b = 1\n"]


def test_data_loads_no_large_package() -> None:
    names = ("torch", "tokenizers", "pyarrow", "rich", "pandas")
    code = f"import sys, memo.data; print([name for name in {names} if name in sys.modules])"
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"

"""Folders of data, and tokenizers, of strangers: nothing outside of a folder gets into a corpus."""

import json
from pathlib import Path
from typing import Any

import pytest
from chats import write_tokenizer

from memo.data.file_kinds import list_files
from memo.data.tokenizer import BPETokenizer
from memo.errors import DataError


@pytest.mark.parametrize("target", ["../secret.txt", "/etc/hostname", "../below"])
def test_a_link_in_a_folder_of_texts_is_refused_by_name(tmp_path: Path, target: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (tmp_path / "secret.txt").write_text("secret")
    (tmp_path / "below").write_text("secret")
    (folder / "a.txt").write_text("a")
    (folder / "b.txt").symlink_to(target)
    with pytest.raises(DataError, match=r"texts/b.txt is a link to .*, outside of .*texts: replace it with a copy"):
        list_files([folder])


def test_links_inside_and_those_of_the_cache_of_the_hub_are_followed(tmp_path: Path) -> None:
    store = tmp_path / "datasets--a--b"
    snapshot = store / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (store / "blobs").mkdir()
    (store / "blobs" / "6f1c").write_text("{}")
    (snapshot / "a.jsonl").symlink_to("../../blobs/6f1c")
    (snapshot / "b.jsonl").symlink_to("a.jsonl")
    assert [path.name for path in list_files([snapshot]).files] == ["a.jsonl", "b.jsonl"]


def test_a_split_and_a_table_that_are_links_are_refused_by_name(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    for inner in (folder, tmp_path / "other"):
        inner.mkdir()
        (inner / "state.json").write_text("{}")
    (tmp_path / "other" / "a.arrow").write_bytes(b"")
    (folder / "a.arrow").symlink_to(tmp_path / "other" / "a.arrow")
    with pytest.raises(DataError, match=r"set/a.arrow is a link to .*other/a.arrow, outside of"):
        list_files([folder])
    (folder / "a.arrow").unlink()
    (folder / "dataset_dict.json").write_text("{}")
    (folder / "train").symlink_to(tmp_path / "other")
    with pytest.raises(DataError, match=r"set holds no"):
        list_files([folder])


class PanicException(BaseException):
    """As pyo3 raises it, which has no Exception above it."""


class Panics:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def encode_batch(self, *_: Any, **__: Any) -> None:
        raise self.error

    decode = encode_batch


def test_a_panic_of_the_library_of_tokenizers_is_one_message(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "chatml", marks=True)
    tokenizer = BPETokenizer(tmp_path / "tokenizer.json")
    tokenizer._tokenizer = Panics(PanicException("index out of\nbounds"))
    for call in (
        lambda: tokenizer.encode("a"),
        lambda: tokenizer.encode_located(["a"]),
        lambda: tokenizer.decode([1]),
    ):
        with pytest.raises(DataError, match=r"tokenizer.json cannot (en|de)code .*: index out of bounds: give a tok"):
            call()
    tokenizer._tokenizer = Panics(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


@pytest.mark.parametrize("damage", [{"type": "Replace", "pattern": {"Regex": "("}, "content": ""}, {"type": "none"}])
def test_rules_that_the_library_refuses_are_one_message(tmp_path: Path, damage: dict[str, Any]) -> None:
    write_tokenizer(tmp_path, "chatml", marks=True)
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": damage}))
    with pytest.raises(DataError, match=r"cannot be read as a tokenizer.json: .*: give a tokenizer.json of Hugging"):
        BPETokenizer(path)

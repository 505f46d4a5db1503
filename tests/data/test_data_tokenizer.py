"""Text survives a round trip, special tokens stay special, and wrong files are refused by name."""

import json
from pathlib import Path

import numpy as np
import pytest

from memo.data.tokenizer import (
    END_OF_DOCUMENT_NAMES,
    BPETokenizer,
    ByteTokenizer,
    Tokenizer,
    load_tokenizer,
    train_bpe,
)
from memo.errors import ConfigError, DataError

TEXTS = [
    "",
    "a",
    "Größe, naïve café",
    "日本語のテキスト",
    "🙂👩‍👩‍👧 emoji",
    "\x00\t\r\n  spaces  ",
    "<|endoftext|> as text",
]
CORPUS = ["def function(argument):\n    return argument\n"] * 20 + TEXTS


@pytest.fixture(scope="module")
def bpe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe(CORPUS, 300, path)
    return path


@pytest.fixture(params=["byte", "bpe"])
def tokenizer(request: pytest.FixtureRequest, bpe_path: Path) -> Tokenizer:
    return load_tokenizer("byte" if request.param == "byte" else bpe_path)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert ids.ndim == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode([*ids.tolist(), tokenizer.eod]) == text
    assert tokenizer.eod not in ids
    assert (ids < tokenizer.vocab_size).all()


def test_batch_equals_one_by_one(tokenizer: Tokenizer) -> None:
    batch = tokenizer.encode_batch(TEXTS)
    assert [ids.tolist() for ids in batch] == [tokenizer.encode(text).tolist() for text in TEXTS]


def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer) -> None:
    for wrong in (-1, tokenizer.vocab_size):
        with pytest.raises(DataError, match=f"{wrong}.*vocabulary of {tokenizer.vocab_size}"):
            tokenizer.decode([0, wrong])


def test_half_a_surrogate_pair_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UnicodeEncodeError):
        tokenizer.encode("\ud83d")


def test_byte_ids_are_utf8_bytes() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("é€").tolist() == list("é€".encode())
    assert (tokenizer.vocab_size, tokenizer.eod) == (257, 256)
    assert tokenizer.decode(tokenizer.encode("é")[1:]) == "\N{REPLACEMENT CHARACTER}"


def test_bytes_are_the_same_as_a_tokenizer_json(tmp_path: Path) -> None:
    """Of a text that spells the end-of-document token, too: as text in a corpus, as that token in a conversation."""
    ours = ByteTokenizer()
    (tmp_path / "tokenizer.json").write_bytes(ours.definition)
    theirs = load_tokenizer(tmp_path)
    assert (theirs.vocab_size, theirs.eod) == (ours.vocab_size, ours.eod)
    every_byte = "".join(map(chr, range(0x800))) + "\uffff\U0010ffff"
    for text in [*TEXTS, every_byte]:
        assert theirs.encode(text).tolist() == ours.encode(text).tolist()
        assert theirs.decode(ours.encode(text)) == text
    (located,) = theirs.encode_located(["é<|endoftext|>"])
    assert located.ids.tolist() == [*"é".encode(), ours.eod]


def test_trained_bpe_merges_and_is_deterministic(tmp_path: Path, bpe_path: Path) -> None:
    first = load_tokenizer(bpe_path)
    assert first.vocab_size == 300
    text = CORPUS[0]
    assert len(first.encode(text)) < len(text) / 2
    train_bpe(CORPUS, 300, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == bpe_path.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["again.json"]


def test_bpe_of_few_texts_has_a_smaller_vocabulary(tmp_path: Path) -> None:
    tokenizer = train_bpe(["ab"], 1000, tmp_path / "tokenizer.json")
    assert tokenizer.vocab_size == 258  # bytes, end of document, "ab"
    assert tokenizer.decode(tokenizer.encode("日本")) == "日本"


def test_bpe_vocabulary_must_hold_all_bytes(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vocab-size = 256.*at least 257"):
        train_bpe(["ab"], 256, tmp_path / "tokenizer.json")


@pytest.mark.parametrize("name", END_OF_DOCUMENT_NAMES)
def test_end_of_document_names(tmp_path: Path, bpe_path: Path, name: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe_path.read_text().replace(END_OF_DOCUMENT_NAMES[0], name))
    tokenizer = BPETokenizer(path)
    assert tokenizer.eod == 0
    assert tokenizer.eod not in tokenizer.encode(f"some {name} text")


def test_no_end_of_document_token_is_refused(tmp_path: Path, bpe_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(bpe_path.read_text().replace(END_OF_DOCUMENT_NAMES[0], "<other>"))
    with pytest.raises(DataError, match=r"tokenizer.json has none of the tokens <\|endoftext\|>"):
        BPETokenizer(path)


def test_stored_truncation_and_padding_are_ignored(tmp_path: Path, bpe_path: Path) -> None:
    definition = json.loads(bpe_path.read_text())
    definition["truncation"] = {
        "direction": "Right",
        "max_length": 4,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    definition["padding"] = {
        "strategy": {"Fixed": 999},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    expected = load_tokenizer(bpe_path).encode(CORPUS[0])
    assert 4 < len(expected) < 999
    assert BPETokenizer(path).encode(CORPUS[0]).tolist() == expected.tolist()


def test_ids_with_holes(tmp_path: Path, bpe_path: Path) -> None:
    """A fine-tuned tokenizer may add tokens at high ids; the vocabulary must cover them."""
    definition = json.loads(bpe_path.read_text())
    definition["added_tokens"].append({**definition["added_tokens"][0], "id": 400, "content": "<extra>"})
    definition["model"]["vocab"]["<extra>"] = 400
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(definition))
    assert BPETokenizer(path).vocab_size == 401


def test_wrong_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer = .*missing.json does not exist"):
        load_tokenizer(tmp_path / "missing.json")
    with pytest.raises(ConfigError, match=r"tokenizer.json does not exist"):
        load_tokenizer(tmp_path)
    for content in (b"{}", b"\xff\xfe", b"not json"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer.json cannot be read"):
            load_tokenizer(tmp_path)

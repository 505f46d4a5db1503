"""Whole conversations in samples of one length: against a token-by-token reconstruction, and what an epoch covers."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from documents import write_corpus

from memo.config import DataConfig
from memo.data import CorpusFacts, IndexedDataset, PackedConversations, PackedDataset, open_corpus
from memo.errors import ConfigError, DataError

FILL = 9999
LENGTHS = {
    "mixed": [5, 2, 17, 3, 8, 2, 2, 16, 2, 0, 4, 9, 9, 7],
    "one": [4],
    "all fill a window": [9, 9, 9],
    "pairs": [4, 5] * 6,
    "all too long": [20, 30, 40],
}
"""Tokens by conversation. Every token of a corpus is different, so it tells where it came from."""


def mask_of(length: int, document: int) -> np.ndarray:
    """Two answers: some tokens in the middle, and the last two."""
    places = np.arange(length)
    return (((places + document) % 5 == 1) | (places >= length - 2)).astype(np.uint8)


def make(folder: Path, lengths: list[int]) -> tuple[IndexedDataset, IndexedDataset]:
    ends = np.cumsum(lengths)
    documents = (np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True))
    tokens = write_corpus(folder / "c", documents)
    mask = write_corpus(folder / "c.mask", map(mask_of, lengths, range(len(lengths))), "u1")
    return IndexedDataset(tokens), IndexedDataset(mask)


def owners(lengths: list[int]) -> list[tuple[int, int]]:
    """For each token, the conversation it is in, and its place there."""
    return [(document, place) for document, length in enumerate(lengths) for place in range(length)]


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("long", ["truncate", "drop"])
def test_samples_against_brute_force(tmp_path: Path, case: str, packing: bool, long: str) -> None:
    """Each conversation is whole (or cut at s + 1) and begins at position 0; only answers of the same one count."""
    s, lengths = 8, LENGTHS[case]
    if case == "all too long" and long == "drop":
        with pytest.raises(ConfigError, match=r"seq-length = 8 is too short for .* 3 conversations .*truncate"):
            PackedConversations(*make(tmp_path, lengths), s, 3, fill=FILL, packing=packing, long_conversations=long)
        return
    data = PackedConversations(*make(tmp_path, lengths), s, 3, fill=FILL, packing=packing, long_conversations=long)
    owner = owners(lengths)
    kept = [min(n, s + 1) for n in lengths if n and (long == "truncate" or n <= s + 1)]
    assert (data.num_kept, data.num_tokens) == (len(kept), sum(kept))
    assert data.num_truncated + data.num_dropped == sum(n > s + 1 for n in lengths)
    assert (data.num_truncated if long == "drop" else data.num_dropped) == 0
    for epoch in range(3):
        seen: Counter[int] = Counter()
        for index in range(epoch * data.samples_per_epoch, (epoch + 1) * data.samples_per_epoch):
            sample = data.sample(index)
            window = [*sample.tokens.tolist(), int(sample.labels[-1])]
            assert window[1:] == sample.labels.tolist() and len(window) == s + 1
            documents = [owner[token][0] if token != FILL else -1 for token in window]
            starts = [i for i in range(s + 1) if i == 0 or documents[i] != documents[i - 1]]
            assert packing or len({d for d in documents if d >= 0}) == 1
            for i, token in enumerate(window):
                start = max(begin for begin in starts if begin <= i)
                assert token == FILL or owner[token][1] == i - start
                if i < s:
                    assert sample.positions[i] == i - start
                    same = documents[i] == documents[i + 1] >= 0
                    learned = same and mask_of(lengths[documents[i]], documents[i])[i + 1 - start]
                    assert sample.loss_mask[i] == float(learned)
            assert sample.cu_seqlens.tolist() == [*(b for b in starts if b < s), s]
            seen.update(token for token in window if token != FILL)
        assert set(seen.values()) == {1} and sum(seen.values()) == sum(kept)


def test_windows_are_few(tmp_path: Path) -> None:
    """Best fit decreasing is optimal for halves and thirds, and within 11/9 + 4 of the bytes for anything."""
    halves = PackedConversations(*make(tmp_path, LENGTHS["pairs"]), 8, 0, fill=FILL)
    assert halves.samples_per_epoch == 6
    lengths = (2 + np.random.default_rng(0).integers(0, 60, 300) ** 2 // 60).tolist()
    many = PackedConversations(*make(tmp_path, lengths), 63, 0, fill=FILL)
    fewest = -(-sum(lengths) // 64)
    assert fewest <= many.samples_per_epoch <= 11 / 9 * fewest + 4
    assert f"300 conversations in {many.samples_per_epoch} samples" in many.describe()


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    files = make(tmp_path, [3] * 40)
    first = PackedConversations(*files, 8, 1, fill=FILL)

    def order(data: PackedConversations, epoch: int) -> list[list[int]]:
        size = data.samples_per_epoch
        return [data.sample(epoch * size + i).tokens.tolist() for i in range(size)]

    epochs = [order(first, epoch) for epoch in range(4)]
    assert all(epochs[0] != other and sorted(epochs[0]) == sorted(other) for other in epochs[1:])
    again = PackedConversations(*files, 8, 1, fill=FILL)
    assert [order(again, epoch) for epoch in (3, 0, 2, 1)] == [epochs[i] for i in (3, 0, 2, 1)]
    assert sorted(order(PackedConversations(*files, 8, 2, fill=FILL), 0)) != sorted(epochs[0])  # others meet


def test_an_answer_beyond_the_cut_is_dropped(tmp_path: Path) -> None:
    tokens = write_corpus(tmp_path / "c", [np.arange(12)] * 3)
    answers = (range(9, 12), range(8, 9), range(1))
    mask = write_corpus(tmp_path / "c.mask", (np.isin(np.arange(12), answer) for answer in answers), "u1")
    data = PackedConversations(IndexedDataset(tokens), IndexedDataset(mask), 8, 0, fill=FILL)
    assert (data.num_kept, data.num_truncated, data.num_dropped) == (1, 1, 2)
    assert data.sample(0).loss_mask.tolist() == [0.0] * 7 + [1.0]
    assert data.describe() == "1 conversations in 1 samples, 100.0 % full; 1 cut at 9 tokens; 2 left out, too long"


def write_facts(prefix: Path, **fields: int) -> None:
    facts = {"tokenizer": "byte", "vocab_size": 257, "eod": 256, "num_documents": 2, "num_tokens": 12, **fields}
    Path(f"{prefix}.json").write_text(json.dumps({"schema_version": 1, **facts}))


def test_facts_decide_what_a_corpus_is(tmp_path: Path) -> None:
    make(tmp_path, [5, 7])
    prefix, data = tmp_path / "c", DataConfig(seq_length=8)
    with pytest.raises(DataError, match=r"c.mask.idx says which tokens of .*c are answers, but .*c.json"):
        open_corpus(prefix, data, seed=0)
    write_facts(prefix)
    assert isinstance(open_corpus(prefix, data, seed=0), PackedDataset)
    write_facts(prefix, num_answer_tokens=5)
    found = open_corpus(prefix, data, seed=0)
    assert isinstance(found, PackedConversations)
    assert 256 in found.sample(0).tokens  # filled with ends of documents
    assert "num_answer_tokens" not in CorpusFacts("byte", 257, 256, 2, 12).to_json()
    dropping = open_corpus(prefix, DataConfig(seq_length=5, long_conversations="drop", packing=False), seed=0)
    assert (dropping.packing, dropping.num_dropped) == (False, 1)
    write_corpus(tmp_path / "c.mask", [np.ones(12)], "u1")
    with pytest.raises(DataError, match=r"c.mask.idx has 1 documents of 12 tokens, .*c.idx 2 of 12"):
        open_corpus(prefix, data, seed=0)
    Path(f"{prefix}.mask.idx").unlink()
    with pytest.raises(DataError, match=r"c.mask.idx does not exist"):
        open_corpus(prefix, data, seed=0)

"""Packed samples against a token-by-token reconstruction, and what an epoch covers."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from documents import write_corpus

from memo.data.hashing import hash64, permutation, uniform
from memo.data.indexed import IndexedDataset
from memo.data.packing import PackedDataset
from memo.data.sample import Sample
from memo.errors import ConfigError, DataError

LENGTHS = {
    "mixed": [5, 1, 17, 3, 8, 1, 1, 30, 2, 0, 4],
    "one document": [40],
    "all of length one": [1] * 33,
    "ends on window edges": [8, 8, 16, 8, 1],
    "exactly one window": [4, 5],
}
"""Document lengths by case. Every token of a corpus is different, so it tells where it came from."""


def make(folder: Path, lengths: list[int]) -> IndexedDataset:
    ends = np.cumsum(lengths)
    documents = (np.arange(end - length, end) for length, end in zip(lengths, ends, strict=True))
    return IndexedDataset(write_corpus(folder / "corpus", documents))


def document_of(lengths: list[int]) -> list[int]:
    """For each token, the document it is in."""
    return [document for document, length in enumerate(lengths) for _ in range(length)]


def check_packed(sample: Sample, owner: list[int]) -> None:
    """Rebuild mask, positions and boundaries one token at a time."""
    tokens, labels = sample.tokens.tolist(), sample.labels.tolist()
    position = 0
    boundaries = [0]
    for i, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        if i > 0 and owner[tokens[i - 1]] != owner[token]:
            position = 0
            boundaries.append(i)
        same = owner[token] == owner[label]
        assert sample.positions[i] == position
        assert sample.loss_mask[i] == float(same)
        assert not same or label == token + 1
        position += 1
    assert sample.cu_seqlens.tolist() == [*boundaries, len(tokens)]


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("seq_length", [1, 2, 7, 8])
def test_samples_against_brute_force(tmp_path: Path, case: str, seq_length: int) -> None:
    lengths = LENGTHS[case]
    dataset = PackedDataset(make(tmp_path, lengths), seq_length, seed=3)
    owner = document_of(lengths)
    for index in range(3 * dataset.samples_per_epoch):
        sample = dataset.sample(index)
        kinds = (sample.tokens, sample.labels, sample.loss_mask, sample.positions, sample.cu_seqlens)
        assert [array.dtype.name for array in kinds] == ["int64", "int64", "float32", "int64", "int32"]
        assert all(len(array) == seq_length for array in kinds[:-1])
        assert sample.tokens[1:].tolist() == sample.labels[:-1].tolist()
        check_packed(sample, owner)


@pytest.mark.parametrize("case", LENGTHS)
@pytest.mark.parametrize("seq_length", [1, 3, 8])
def test_an_epoch_covers_every_token_once(tmp_path: Path, case: str, seq_length: int) -> None:
    """(N - 1) // s * s tokens are inputs, each once; the rest, at most s, are the epoch's end."""
    num_tokens = sum(LENGTHS[case])
    dataset = PackedDataset(make(tmp_path, LENGTHS[case]), seq_length, seed=0)
    size = dataset.samples_per_epoch
    assert size == (num_tokens - 1) // seq_length
    for epoch in range(3):
        samples = [dataset.sample(index) for index in range(epoch * size, (epoch + 1) * size)]
        count = Counter(token for sample in samples for token in sample.tokens.tolist())
        assert max(count.values()) == 1
        assert len(count) == size * seq_length
        assert 1 <= num_tokens - len(count) <= seq_length
        labels = Counter(label for sample in samples for label in sample.labels.tolist())
        assert max(labels.values()) == 1


def test_packing_off_is_one_text(tmp_path: Path) -> None:
    corpus = make(tmp_path, LENGTHS["mixed"])
    packed = PackedDataset(corpus, 8, seed=1)
    plain = PackedDataset(corpus, 8, seed=1, packing=False)
    for index in range(20):
        sample = plain.sample(index)
        assert np.array_equal(sample.tokens, packed.sample(index).tokens)
        assert np.array_equal(sample.labels, packed.sample(index).labels)
        assert sample.cu_seqlens.tolist() == [0, 8]
        assert sample.positions.tolist() == list(range(8))
        assert sample.loss_mask.tolist() == [1.0] * 8


def test_order_depends_on_seed_and_epoch_only(tmp_path: Path) -> None:
    corpus = make(tmp_path, [3] * 50)

    def order(dataset: PackedDataset, epoch: int) -> list[list[int]]:
        size = dataset.samples_per_epoch
        return [dataset.sample(epoch * size + offset).tokens.tolist() for offset in range(size)]

    first = PackedDataset(corpus, 7, seed=1)
    epochs = [order(first, epoch) for epoch in range(4)]
    assert all(epochs[0] != other for other in epochs[1:])
    # Not only the order of windows: documents lie in another order, so the windows themselves differ.
    assert all(sorted(epochs[0]) != sorted(other) for other in epochs[1:])
    again = PackedDataset(corpus, 7, seed=1)
    assert [order(again, epoch) for epoch in (3, 0, 2, 1)] == [epochs[i] for i in (3, 0, 2, 1)]
    assert order(PackedDataset(corpus, 7, seed=2), 0) != epochs[0]
    # Samples themselves are shuffled: they do not follow one another in the epoch's text.
    following = sum(a[-1] + 1 == b[0] for a, b in zip(epochs[0], epochs[0][1:], strict=False))
    assert following < len(epochs[0]) / 2


def test_the_order_of_samples_differs_between_epochs_where_documents_cannot(tmp_path: Path) -> None:
    """One document lies in one order, so every epoch has the same windows: they must come in another order."""
    dataset = PackedDataset(make(tmp_path, [161]), 4, seed=1)
    size = dataset.samples_per_epoch
    firsts = [[int(dataset.sample(epoch * size + i).tokens[0]) for i in range(size)] for epoch in range(3)]
    assert sorted(firsts[0]) == sorted(firsts[1]) == sorted(firsts[2]) == list(range(0, 160, 4))
    assert len({tuple(order) for order in firsts}) == 3


def test_two_epochs_are_kept_and_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch across the end of an epoch makes each epoch's order once, and a long run does not collect them."""
    made = []

    def counting(key: tuple[int, ...], size: int) -> np.ndarray:
        made.append(key)
        return permutation(key, size)

    monkeypatch.setattr("memo.data.packing.permutation", counting)
    dataset = PackedDataset(make(tmp_path, [3] * 50), 7, seed=1)
    size = dataset.samples_per_epoch
    for _ in range(3):
        for epoch in (0, 1):
            dataset.sample(epoch * size)
    assert len(made) == len(set(made)) == 4  # documents and samples of two epochs
    for epoch in range(2, 6):
        dataset.sample(epoch * size)
        assert dataset._epoch.cache_info().currsize == 2


def test_sample_order_never_changes() -> None:
    """Resumed runs rely on these very numbers: a failure here is a broken promise, not a stale test."""
    assert permutation((1234, 0, 0), 16).tolist() == [7, 14, 4, 15, 2, 10, 3, 0, 1, 5, 13, 8, 12, 9, 6, 11]
    assert permutation((-1, 5, 1), 8).tolist() == [2, 6, 3, 1, 4, 5, 7, 0]


def test_hash_is_split_mix() -> None:
    """SplitMix64 from state 0, which advances by the golden ratio: its first two outputs (splitmix64.c)."""
    states = np.array([0, 0x9E3779B97F4A7C15], dtype=np.uint64)
    assert [hex(int(value)) for value in hash64((), states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4"]


def test_hashes_are_even() -> None:
    draws = uniform((7,), np.arange(100_000))
    assert 0.0 <= draws.min() <= draws.max() < 1.0
    counts = np.histogram(draws, bins=10, range=(0.0, 1.0))[0]
    assert np.abs(counts - 10_000).max() < 500  # 5 standard deviations of 95
    assert sorted(permutation((1, 2), 1000).tolist()) == list(range(1000))
    for other in ((8,), (7, 0), (-7,), (7 + (1 << 32),)):
        assert abs(np.corrcoef(draws, uniform(other, np.arange(100_000)))[0, 1]) < 0.02


def test_refusals(tmp_path: Path) -> None:
    corpus = make(tmp_path, [4, 4])
    assert PackedDataset(corpus, 7, seed=0).samples_per_epoch == 1
    with pytest.raises(ConfigError, match=r"seq-length = 8 needs at least 9 tokens, but .*corpus has only 8"):
        PackedDataset(corpus, 8, seed=0)
    floats = write_corpus(tmp_path / "floats", [np.zeros(9)], "<f4")
    with pytest.raises(DataError, match=r"floats.bin holds float32"):
        PackedDataset(IndexedDataset(floats), 4, seed=0)

"""Token ids of any Dataset or iterable: cut as a corpus is, in the same order every time."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from memo.data import checked_sample
from memo.data.hashing import permutation
from memo.data.token_stream import TokenStream, is_stream
from memo.errors import ConfigError, DataError

LENGTH = 8
DOCUMENTS = [list(range(100 * d, 100 * d + size)) for d, size in enumerate((3, 20, 1, 9, 0, 8, 40, 2))]


class Mapped(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return len(DOCUMENTS)

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.tensor(DOCUMENTS[number], dtype=torch.int64)


class Iterated(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __len__(self) -> int:  # some have one, and no items by number
        return len(DOCUMENTS)

    def __iter__(self) -> Iterator[dict[str, list[int]]]:
        return iter({"input_ids": document, "attention_mask": [1] * len(document)} for document in DOCUMENTS)


class Again:
    """Anything with __iter__."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def by_definition(epochs: list[list[list[int]]]) -> list[tuple[list[int], list[int], list[int], list[float]]]:
    """Tokens, labels, positions and loss mask of each window, token by token."""
    found = []
    for documents in epochs:
        tokens = [(token, place, place + 1 == len(d)) for d in documents for place, token in enumerate(d)]
        for first in range(0, len(tokens) - LENGTH, LENGTH):
            window = tokens[first : first + LENGTH + 1]
            positions, place = [], 0
            for _, _, is_end in window[:-1]:
                positions.append(place)
                place = 0 if is_end else place + 1
            mask = [0.0 if is_end else 1.0 for _, _, is_end in window[:-1]]
            ids = [token for token, _, _ in window]
            found.append((ids[:-1], ids[1:], positions, mask))
    return found


def assert_samples(stream: TokenStream, expected: list[Any]) -> None:
    for index, (tokens, labels, positions, mask) in enumerate(expected):
        sample = checked_sample(stream, index, 10_000)
        assert (sample.tokens.tolist(), sample.labels.tolist()) == (tokens, labels)
        assert (sample.positions.tolist(), sample.loss_mask.tolist()) == (positions, mask)


@pytest.mark.parametrize(
    "source",
    [
        Iterated(),
        Again(lambda: iter(DOCUMENTS)),
        Again(lambda: (np.array(d, dtype=np.uint16) for d in DOCUMENTS)),
        Again(lambda: iter(torch.utils.data.DataLoader(DOCUMENTS, batch_size=None, collate_fn=lambda d: d))),
    ],
    ids=["IterableDataset", "lists", "arrays", "DataLoader"],
)
def test_what_is_iterated_keeps_its_order(source: Any) -> None:
    expected = by_definition([DOCUMENTS] * 3)
    assert len(expected) == 3 * ((83 - 1) // LENGTH)
    assert_samples(TokenStream(source, LENGTH, seed=1), expected)


@pytest.mark.parametrize("source", [Mapped(), DOCUMENTS, tuple(DOCUMENTS)], ids=["Dataset", "list", "tuple"])
def test_what_has_numbers_is_shuffled_by_seed_and_epoch(source: Any) -> None:
    orders = [[DOCUMENTS[i] for i in permutation((7, epoch, 2), len(DOCUMENTS))] for epoch in range(3)]
    stream = TokenStream(source, LENGTH, seed=7)
    assert_samples(stream, by_definition(orders))
    assert stream.samples_per_epoch == (83 - 1) // LENGTH
    assert orders[0] != orders[1]


def test_any_order_of_questions_gives_the_same_samples() -> None:
    """Each rank asks for its own samples, an evaluation begins again, and a resumed run begins in the middle."""
    expected = by_definition([DOCUMENTS] * 20)
    stream = TokenStream(Iterated(), LENGTH, seed=1)
    for index in (150, 3, 0, 99, 100, 98, 7, 0):
        assert stream.sample(index).tokens.tolist() == expected[index][0]


def test_single_ids_are_one_document_and_batches_are_several() -> None:
    ids = list(range(9000))
    for source in (Again(lambda: iter(ids)), Again(lambda: iter(np.array(ids)))):
        stream = TokenStream(source, LENGTH, seed=1)
        assert_samples(stream, by_definition([[ids]])[:1100])
    rows = np.arange(60).reshape(3, 20)
    for item in (rows, torch.from_numpy(rows), {"input_ids": rows}):
        stream = TokenStream(Again(lambda item=item: iter([item])), LENGTH, seed=1)  # type: ignore[misc]
        assert_samples(stream, by_definition([rows.tolist()]))


def test_padding_is_left_out_and_labels_say_what_is_learned() -> None:
    item = {
        "input_ids": [[5, 6, 7, 8, 9], [1, 2, 3, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]],
        "labels": [[-100, -100, 7, 8, 9], [-100, 2, 3, -100, -100]],
    }
    stream = TokenStream(Again(lambda: iter([item])), 7, seed=1)
    sample = stream.sample(0)
    assert sample.tokens.tolist() == [5, 6, 7, 8, 9, 1, 2] and sample.labels.tolist() == [6, 7, 8, 9, 1, 2, 3]
    assert sample.loss_mask.tolist() == [0, 1, 1, 1, 0, 1, 1]
    assert sample.cu_seqlens.tolist() == [0, 5, 7]
    assert TokenStream(Again(lambda: iter([item])), 7, seed=1, packing=False).sample(0).cu_seqlens.tolist() == [0, 7]


def test_a_generator_is_read_once() -> None:
    stream = TokenStream((d for d in DOCUMENTS), LENGTH, seed=1)
    expected = by_definition([DOCUMENTS])
    for index in range(10):
        assert stream.sample(index).tokens.tolist() == expected[index][0]
    assert stream.sample(2).tokens.tolist() == expected[2][0], "asked for again by the planning of memory"
    with pytest.raises(DataError, match=r"train_data is a generator that has ended after 10 samples of 8 tokens"):
        stream.sample(10)
    far = TokenStream((list(range(900)) for _ in range(1)), LENGTH, seed=1)
    far.sample(50)
    with pytest.raises(DataError, match=r"a generator, which can be read but once, and sample 3 was read before"):
        far.sample(3)
    with pytest.raises(AttributeError):
        _ = stream.samples_per_epoch


def test_what_a_stream_says_of_itself() -> None:
    first = TokenStream(Iterated(), LENGTH, seed=1)
    assert first.identity() == TokenStream(Again(lambda: iter(DOCUMENTS)), LENGTH, seed=1).identity()
    assert first.identity() != TokenStream(Again(lambda: iter(DOCUMENTS[1:])), LENGTH, seed=1).identity()
    assert TokenStream(DOCUMENTS, LENGTH, seed=1).identity() != TokenStream(DOCUMENTS, LENGTH, seed=3).identity()
    assert first.describe() == "documents from a Iterated, in the order of its own"
    assert first.where(3, 2) == "train_data (Iterated), token 26 of those it hands out"
    assert not is_stream("data/a") and not is_stream({"a": 1}) and not is_stream(3) and is_stream(iter([]))


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([["a", "text"]], r"item 0: input_ids has the shape \(2,\) and dtype <U4: hand out whole numbers"),
        (["a text"], r"item 0 is a text, and the run has no tokenizer"),
        ([[0.5, 1.0]], r"dtype float64: hand out whole numbers"),
        ([[[1, 2], [3]]], r"item 0: input_ids cannot be read as an array"),
        ([{"text": "a"}], r"item 0 has the fields text, but not input_ids: hand out token ids, or the texts alone"),
        ([{"input_ids": [1, 2], "labels": [2, 3]}], r"item 0: labels differ from input_ids: give the ids themselves"),
        ([{"input_ids": [1, 2], "labels": [2]}], r"item 0: labels has the shape \(1, 1\), but input_ids \(1, 2\)"),
    ],
)
def test_items_that_are_no_token_ids(items: list[Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        TokenStream(Again(lambda: iter(items)), LENGTH, seed=1)


def test_too_few_tokens() -> None:
    for source in ([], [[1, 2, 3]], Again(lambda: iter([[1] * LENGTH]))):
        with pytest.raises(ConfigError, match=r"but --seq-length 8 needs at least 9: give more of them"):
            TokenStream(source, LENGTH, seed=1)

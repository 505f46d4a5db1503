"""Ids that the model has no row for, and masks that weigh wrongly: refused where samples are read, by name."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from memo.config import DataConfig
from memo.data import (
    IndexedDatasetWriter,
    MockDataset,
    NeedleDataset,
    PackedConversations,
    Sample,
    SampleDataset,
    checked_sample,
    open_corpus,
)
from memo.data.facts import CorpusFacts
from memo.data.sample import cut_sample
from memo.errors import DataError

VOCABULARY, SEQ_LENGTH = 100, 8
LENGTHS = [5, 0, 17, 3, 9, 30]


def write(prefix: Path, document: int, token: int, value: int) -> Path:
    """Documents of LENGTHS tokens, all of them in the vocabulary but one."""
    with IndexedDatasetWriter(prefix, "<i4") as writer:
        for number, length in enumerate(LENGTHS):
            ids = np.arange(length) % VOCABULARY
            if number == document:
                ids[token] = value
            writer.add_document(ids)
    return prefix


def write_mask(prefix: Path, value: float, dtype: str = "u1", eod: int = 0) -> None:
    """All tokens are answers but the first of each document; the last one of document 2 has `value`."""
    with IndexedDatasetWriter(f"{prefix}.mask", dtype) as writer:
        for number, length in enumerate(LENGTHS):
            mask = np.ones(length, dtype=dtype)
            mask[:1] = 0
            if number == 2:
                mask[-1] = value
            writer.add_document(mask)
    facts = CorpusFacts("byte", VOCABULARY, eod, len(LENGTHS), sum(LENGTHS), 1)
    Path(f"{prefix}.json").write_text(facts.to_json())


def fault(data: SampleDataset, count: int) -> str:
    """The message for the first of `count` samples that is refused; the others are as they were."""
    for index in range(count):
        try:
            sample = checked_sample(data, index, VOCABULARY)
        except DataError as error:
            return str(error)
        assert np.array_equal(sample.tokens, data.sample(index).tokens)
    raise AssertionError("nothing was refused")


@pytest.mark.parametrize("value", [VOCABULARY, 2**31 - 1, -1, -(2**31)])
@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize(("document", "token"), [(0, 0), (2, 16), (3, 1), (5, 29)])
def test_every_token_of_a_corpus_is_named(tmp_path: Path, value: int, packing: bool, document: int, token: int) -> None:
    prefix = write(tmp_path / "c", document, token, value)
    data = open_corpus(prefix, DataConfig(seq_length=SEQ_LENGTH, packing=packing), seed=3)
    told = fault(data, 3 * data.samples_per_epoch)
    assert told.startswith(f"{prefix}.bin, document {document}, token {token} (position ")
    assert f"the id is {value}, but the model's vocabulary has 100 tokens, 0 to 99: build the corpus again" in told
    assert (f"--vocab-size {value + 1} or more" in told) == (value > 0)


@pytest.mark.parametrize("long", ["truncate", "drop"])
@pytest.mark.parametrize(("document", "token"), [(0, 4), (3, 0), (4, 8)])
def test_every_token_of_conversations_is_named(tmp_path: Path, long: Any, document: int, token: int) -> None:
    prefix = write(tmp_path / "c", document, token, 1234)
    write_mask(prefix, 1)
    data = open_corpus(prefix, DataConfig(seq_length=SEQ_LENGTH, long_conversations=long), seed=3)
    assert isinstance(data, PackedConversations)
    assert fault(data, data.samples_per_epoch).startswith(f"{prefix}.bin, document {document}, token {token} (")


def test_what_fills_a_window_is_checked(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", 0, 0, 0)
    write_mask(prefix, 1, eod=VOCABULARY)
    data = open_corpus(prefix, DataConfig(seq_length=SEQ_LENGTH), seed=3)
    told = fault(data, data.samples_per_epoch)
    assert told.startswith(f"{prefix}.json, the field eod, which fills what conversations leave free (position ")
    assert "the id is 100" in told


@pytest.mark.parametrize(("value", "dtype"), [(7, "u1"), (-1, "i1"), (0.5 + 1, "<f4"), (1e300, "<f8")])
def test_a_mask_that_weighs_more_than_a_token(tmp_path: Path, value: float, dtype: str) -> None:
    prefix = write(tmp_path / "c", 0, 0, 0)
    write_mask(prefix, value, dtype)
    data = open_corpus(prefix, DataConfig(seq_length=40), seed=3)
    with np.errstate(over="ignore"):
        told = fault(data, data.samples_per_epoch)
    assert told.startswith(f"{prefix}.bin, document 2, token 16 (position ")
    assert told.endswith("but must be from 0 to 1: build the corpus again") and "its loss mask is " in told


def test_needles_name_the_text_or_the_given_ids(tmp_path: Path) -> None:
    prefix = write(tmp_path / "c", 5, 2, 555)
    text = open_corpus(prefix, DataConfig(seq_length=40), seed=3)
    told = fault(NeedleDataset(text, 7, num_needles=2, key_length=1, value_length=1), 20)
    assert told.startswith(f"{prefix}.bin, document 5, token 2 (position ")
    given = NeedleDataset(MockDataset(VOCABULARY, 40, 3), 7, num_needles=2, values=[200])
    assert fault(given, 1).startswith("the keys or values that were given for the needles (position ")


class OfAUser:
    """One sample, parts of which are replaced."""

    def __init__(self, **parts: Any) -> None:
        self.seq_length, self.parts = 4, parts

    def sample(self, index: int) -> Sample:
        return dataclasses.replace(cut_sample(np.arange(5), np.array([2])), **self.parts)


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        (
            {"tokens": np.array([0, 1, -1, 3])},
            r"^OfAUser.sample\(0\), token 2 \(position 2 of .*\): the id is -1,",
        ),
        ({"labels": np.array([0, 1, 2, 999])}, r"^OfAUser.sample\(0\), token 4 \(position 3 .*: the id is 999,"),
        ({"tokens": np.zeros(3, int)}, r"^OfAUser.sample\(0\).tokens has shape \(3,\) .* must have shape \(4,\)"),
        ({"labels": np.zeros(4)}, r"labels has shape \(4,\) and dtype float64, .* hold integer values: mend that"),
        ({"loss_mask": np.array([0, 1, np.nan, 1.0])}, r"token 3 \(position 2 .*its loss mask is nan, but must be"),
        ({"loss_mask": np.array([0, -1, 1.0, 1.0])}, r"token 2 \(position 1 .*its loss mask is -1.0"),
        ({"loss_mask": np.array([0, np.inf, 1.0, 1.0])}, r"its loss mask is inf"),
        ({"positions": np.array([0, 1, 2, 4])}, r"^OfAUser.sample\(0\).positions\[3\] is 4, but must be from 0 to 3"),
        ({"positions": np.array([0, -1, 2, 3])}, r"positions\[1\] is -1"),
        ({"cu_seqlens": np.array([0, 3])}, r"cu_seqlens is \[0, 3\], but must rise from 0 to 4: mend that dataset"),
        ({"cu_seqlens": np.array([0, 3, 2, 4])}, r"cu_seqlens is \[0, 3, 2, 4\]"),
    ],
)
def test_a_dataset_of_a_user_is_checked_alike(parts: dict[str, Any], told: str) -> None:
    assert checked_sample(OfAUser(), 0, VOCABULARY).tokens.tolist() == [0, 1, 2, 3]
    with pytest.raises(DataError, match=told):
        checked_sample(OfAUser(**parts), 0, VOCABULARY)

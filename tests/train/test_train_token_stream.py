"""Training on what hands out token ids: any layout reads the same, and a run goes on to the last bit or is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import assert_equal_bits
from layouts import tiny
from ranks import run_ranks
from trainers import tiny_trainer, train_whole_and_in_two

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.data import ByteTokenizer
from memo.errors import CheckpointError, ConfigError, DataError
from memo.train.data_sources import are_texts, tokenizer_of

STEPS = 2


def documents(shift: int = 0) -> Iterator[np.ndarray]:
    for number in range(60):
        yield (np.arange(20 + number % 13) * 7 + number + shift) % 60


class Iterated(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
    def __iter__(self) -> Iterator[np.ndarray]:
        return documents()


def make(kind: str) -> Any:
    return {"list": list, "generator": iter}[kind](documents())


def trainer(data: Any, **overrides: Any) -> memo.Trainer:
    return tiny_trainer(train_data=data, mock_data=False, lr_decay_iters=2 * STEPS, **overrides)


def _whole_and_in_two(folder: Path, kind: str) -> None:
    train_whole_and_in_two(lambda **flags: trainer(make(kind), **flags), folder, STEPS)


@pytest.mark.parametrize("kind", ["list", "generator"])
def test_a_run_goes_on_where_it_was(kind: str, tmp_path: Path) -> None:
    """What came before is read again and skipped; another source is refused by how it begins."""
    run_ranks(2, _whole_and_in_two, tmp_path, kind)
    assert_equal_bits(latest_checkpoint(tmp_path / "parts"), latest_checkpoint(tmp_path / "whole"))
    run_ranks(1, _another_is_refused, tmp_path)


def _another_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"its run was another: data_path a stream that begins with"):
        trainer(list(documents(shift=1)), load=str(folder / "parts"), global_batch_size=4)


def test_evaluations_read_it_from_the_beginning() -> None:
    run_ranks(1, _evaluates)


def _evaluates() -> None:
    with trainer(
        make("list"), eval_data={"a": Iterated(), "b": list(documents(3))}, train_iters=1, eval_iters=2
    ) as made:
        first = made.evaluate(name="a")
        made.step()
        assert made.evaluate(name="a") != first
        assert made.evaluate(name="a") == made.evaluate(name="a") != made.evaluate(name="b")


def test_what_is_no_data() -> None:
    with pytest.raises(ConfigError, match=r"train_data is a int: give the prefix of a corpus, a list of weights"):
        trainer(5)
    with pytest.raises(ConfigError, match=r"seq_length is 0: give a whole number from 1"):
        trainer(make("list"), seq_length=0)


TEXTS = [f"document {number} of a few words, " * 3 for number in range(40)]


def test_texts_train_with_a_tokenizer() -> None:
    """As the tokens of the same texts do; a list of prefixes stays one."""
    run_ranks(1, _trains_on_texts)


def _trains_on_texts() -> None:
    ids = [np.append(ByteTokenizer().encode(text), ByteTokenizer.eod) for text in TEXTS]
    values = {"vocab_size": 257, "train_iters": 1, "eval_iters": 1}
    losses = []
    for data in (TEXTS, ids, iter(TEXTS)):
        with trainer(data, tokenizer="byte", eval_data=TEXTS[:10], **values) as made:
            losses.append((made.evaluate(), made.step().lm_loss))
    assert losses[0] == losses[1] and losses[0][0] == losses[2][0]
    with pytest.raises(DataError, match=r"train_data \(list\), item 0 is a text, .* such as tokenizer='byte'"):
        trainer(TEXTS)
    with pytest.raises(DataError, match=r"--data-path data/nope: there is no data/nope.bin"):
        trainer(["data/nope", "data/neither"], tokenizer="byte")
    for name, ours in (("train_dataset", "train_data"), ("eval_dataset", "eval_data")):
        with pytest.raises(ConfigError, match=rf"there is no keyword '{name}': memo calls it {ours}: the prefix of a"):
            memo.Trainer("gpt-tiny", **{name: TEXTS})


def test_texts_take_the_tokenizer_of_the_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(ByteTokenizer().definition)
    config = tiny(mock_data=False, pretrained_checkpoint=str(tmp_path))
    assert tokenizer_of(config) is None
    found = tokenizer_of(config, has_texts=are_texts(TEXTS))
    assert found is not None and found.vocab_size == 257


def test_which_lists_hold_texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my corpus.idx").write_bytes(b"")
    assert are_texts(TEXTS) and are_texts(["one", "word" * 100])
    for source in (["data/a", "data/b"], ["my corpus"], [0.7, "a text"], [], "a text", [np.arange(3)], None):
        assert not are_texts(source), source

"""A run on a blend: stopped and gone on with it is the same run to the last bit, and another blend is another run."""

import functools
from pathlib import Path
from typing import Any

import pytest
from checkpoints import assert_equal_bits
from documents import write_corpus
from layouts import tiny
from ranks import run_ranks
from trainers import tiny_trainer, train_whole_and_in_two

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.data import build_corpus, train_bpe
from memo.errors import CheckpointError, ConfigError
from memo.train.same_flags import _fields

STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("blend")
    for name, size in (("a", 12), ("b", 2), ("c", 5)):
        documents = ([(size + 7 * document + 3 * token) % 60 for token in range(100)] for document in range(size))
        write_corpus(folder / name, documents)
    return folder


def trainer(data: object, **overrides: Any) -> memo.Trainer:
    return tiny_trainer(train_data=data, mock_data=False, lr_decay_iters=2 * STEPS, **overrides)


def _whole_and_in_two(folder: Path) -> None:
    words = [0.7, folder / "a", 0.3, str(folder / "b")]  # b ends after six of its samples
    train_whole_and_in_two(functools.partial(trainer, words), folder, STEPS)


def test_a_blend_goes_on_to_the_last_bit_and_another_is_refused(folder: Path) -> None:
    run_ranks(2, _whole_and_in_two, folder)
    assert_equal_bits(latest_checkpoint(folder / "parts"), latest_checkpoint(folder / "whole"))
    run_ranks(1, _others_are_refused, folder)


def _others_are_refused(folder: Path) -> None:
    a, b, c = (str(folder / name) for name in "abc")
    for words in ([0.6, a, 0.4, b], [0.7, a, 0.3, c], [0.3, b, 0.7, a], [a, b], a):
        with pytest.raises(CheckpointError, match=r"its run was another: data_path 0\.7 of 12 documents"):
            trainer(words, load=str(folder / "parts"), global_batch_size=4)
    with trainer([7, a, 3, b], load=str(folder / "parts"), global_batch_size=4) as made:
        assert made.iteration == 2 * STEPS


def test_the_header_tells_the_blend(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_ranks(1, _header, folder)


def _header(folder: Path) -> None:
    from memo.train.header import describe_start

    with trainer([3, folder / "a", 1, folder / "b"], train_iters=10) as made:
        text = describe_start(made.parts, made._prepared)
    assert "data: a blend of 2 corpora, 21 samples an epoch\n" in text
    assert "  75 % " in text and "; 1.67 passes in this run" in text  # 30 samples of 18


def test_corpora_of_two_tokenizers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("some words and more words " * 50)
    train_bpe(["some words and more words"], 270, tmp_path / "tokenizer.json")
    build_corpus([tmp_path / "t.txt"], tmp_path / "bytes")
    build_corpus([tmp_path / "t.txt"], tmp_path / "words", tokenizer=str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match="built with different tokenizers, byte and bpe-"):
        trainer([tmp_path / "bytes", tmp_path / "words"], vocab_size=None)


def test_ranks_may_have_copies_elsewhere_but_not_other_weights() -> None:
    def flags(*words: str) -> dict[str, object]:
        return _fields(tiny(data_path=list(words), mock_data=False))

    assert flags("0.7", "/a/x", "0.3", "/a/y") == flags("0.7", "/b/x", "0.3", "/b/y")
    assert flags("0.7", "/a/x", "0.3", "/a/y") != flags("0.6", "/a/x", "0.4", "/a/y")

"""--split and evaluation sets by name: which documents each reads, and what a run says of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from documents import write_corpus
from trainers import tiny_trainer

import memo
from memo.artifacts.run_log import RunLog
from memo.config import RunConfig
from memo.config.blend import read_eval_sets
from memo.config.checks import check
from memo.config.data import DataConfig
from memo.config.evaluation_run import for_evaluation
from memo.config.split import documents_of, read_split
from memo.data import IndexedDataset, MockDataset, open_corpora
from memo.data.corpus import with_epochs
from memo.errors import ConfigError, DataError


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> str:
    """40 documents, the d-th of 50 + d tokens, all of them d."""
    documents = ([document] * (50 + document) for document in range(40))
    return write_corpus(tmp_path_factory.mktemp("split") / "corpus", documents)


def trainer(**overrides: Any) -> memo.Trainer:
    return tiny_trainer(mock_data=False, seq_length=32, train_iters=2, eval_iters=1, **overrides)


def test_parts_are_runs_of_documents_as_megatron_rounds_them() -> None:
    """int(round(share before x n)) to int(round(share with it x n)), of shares divided by their sum."""
    split = read_split("969, 30, 1")
    assert split.train == (0.0, 0.969) and split.valid == (0.969, 0.999) and split.test == (0.999, 1.0)
    assert [documents_of(part, 1000) for part in (split.train, split.valid, split.test) if part] == [
        range(969),
        range(969, 999),
        range(999, 1000),
    ]
    assert read_split("100").valid is None and read_split("1,0,1").valid is None
    halves = read_split("1,1")
    assert [documents_of(part, 5) for part in (halves.train, halves.valid) if part] == [range(2), range(2, 5)]
    for text in ("98,1,1", "1,1,1", "7,2,1"):
        found = read_split(text)
        parts = [documents_of(part, 1237) for part in (found.train, found.valid, found.test) if part]
        assert [number for part in parts for number in part] == list(range(1237)), "each document is in one part"


@pytest.mark.parametrize("text", ["98,1,1,1", "98;2", "a,b", "-1,2", "nan,1", "", "0,1,1", "0", "1e3,2"])
def test_what_is_no_split(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--split is "):
        read_split(text)


def test_a_part_of_a_corpus_holds_its_documents_and_no_others(prefix: str) -> None:
    part = IndexedDataset(prefix, (0.5, 0.75))
    assert [int(part[i][0]) for i in range(len(part))] == list(range(20, 30)) and part.first_document == 20
    assert part.document_lengths.tolist() == list(range(70, 80))
    assert part.describe_content() != IndexedDataset(prefix, (0.25, 0.5)).describe_content()
    assert IndexedDataset(prefix, (0.0, 1.0)).describe_content() == IndexedDataset(prefix).describe_content()
    data = DataConfig(seq_length=32)
    dataset = open_corpora("--data-path", [prefix], data, 3, (0.5, 0.75))
    tokens = {int(t) for i in range(dataset.samples_per_epoch) for t in dataset.sample(i).tokens}
    assert tokens <= set(range(20, 30))
    where = dataset.where(0, 0)
    assert where.startswith(f"{prefix}.bin, document {int(dataset.sample(0).tokens[0])}, token ")
    with pytest.raises(DataError, match=r"has 40 documents, of which none is from 99\.9 % to 100 % of them"):
        IndexedDataset(prefix, (0.999, 1.0))


def test_a_run_trains_on_one_part_is_evaluated_on_the_next_and_at_its_end_on_the_last(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    with trainer(data_path=prefix, split="80,10,10", eval_interval=1, log_jsonl=str(log)) as made:
        training, held_out, test = (made.feed.dataset, *made.eval_sets.values())
        assert list(made.eval_sets) == ["", "test"] and made.eval_data is held_out
        found = [
            {int(token) for i in range(each.samples_per_epoch) for token in each.sample(i).tokens}  # type: ignore[attr-defined]
            for each in (training, held_out, test)
        ]
        assert [(min(each), max(each)) for each in found] == [(0, 31), (32, 35), (36, 39)]
        made.train()
        last, at_end = made.evaluate(), made.evaluate(name="test")
    evaluations = [entry for line in log.read_text().splitlines() if "evaluation" in (entry := json.loads(line))]
    assert [(entry["iteration"], entry["evaluation"].get("data")) for entry in evaluations] == [
        (1, None),
        (2, None),
        (2, "test"),
    ]
    assert [entry["evaluation"]["loss"] for entry in evaluations[1:]] == [last, at_end]
    assert [loss for _, loss in RunLog.load(log).evaluations][-1] == last
    told = capsys.readouterr().out
    assert told.count("validation loss ") >= 2 and told.count("test loss ") == 1


def test_epochs_count_what_is_trained_on(prefix: str) -> None:
    config = RunConfig().override({"data_path": prefix, "seq_length": 16, "gbs": 1, "num_epochs": 1.0})
    whole = with_epochs(config, 1).training.train_iters
    part = with_epochs(config.override({"split": "50,50"}), 1).training.train_iters
    assert part == (sum(range(50, 70)) - 1) // 16 < whole


def test_a_blend_is_split_corpus_by_corpus(prefix: str, tmp_path: Path) -> None:
    other = write_corpus(tmp_path / "b", ([50 + document] * 60 for document in range(10)))
    with trainer(data_path=[0.5, prefix, 0.5, other], split="80,20", eval_interval=1) as made:
        for dataset, first, second in (
            (made.feed.dataset, range(32), range(50, 58)),
            (made.eval_data, range(32, 40), range(58, 60)),
        ):
            tokens = {int(token) for i in range(60) for token in dataset.sample(i).tokens}  # type: ignore[union-attr]
            assert tokens <= {*first, *second} and tokens & set(first) and tokens & set(second)


def test_sets_by_name_are_each_evaluated_and_told(
    prefix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    own = {"web": MockDataset(61, 32, 7), "code": MockDataset(61, 32, 8)}
    with trainer(train_data=prefix, eval_data=own, eval_interval=2, log_jsonl=str(log)) as made:
        made.train()
        expected = {name: made.evaluate(name=name) for name in own}
        assert made.evaluate() == expected["web"] != expected["code"]
        with pytest.raises(ConfigError, match=r"there is no evaluation set 'books': give one of 'web', 'code'"):
            made.evaluate(name="books")
    evaluations = [
        entry["evaluation"] for line in log.read_text().splitlines() if "evaluation" in (entry := json.loads(line))
    ]
    assert {entry["data"]: entry["loss"] for entry in evaluations} == expected
    assert RunLog.load(log).evaluations == ((2, expected["web"]),)
    told = capsys.readouterr().out
    assert "web loss " in told and "code loss " in told


def test_names_of_sets() -> None:
    assert read_eval_sets(["web=data/w", "code=data/c=1"]) == {"web": ("data/w",), "code": ("data/c=1",)}
    assert read_eval_sets(["0.5", "a", "0.5", "b"]) == {"": ("0.5", "a", "0.5", "b")}
    assert read_eval_sets(["runs/lr=3/a"]) == {"": ("runs/lr=3/a",)}


def test_memo_evaluate_reads_what_was_not_trained_on(prefix: str) -> None:
    split = RunConfig().override({"data_path": prefix, "split": "9,1", "load": "runs/a"})
    assert for_evaluation(split, 1).data == split.data
    check(for_evaluation(split, 1), 1)
    named = RunConfig().override({"data_path": prefix, "eval_data_path": ["web=w", "code=c"], "eval_interval": 1})
    read = for_evaluation(named, 1).data
    assert (read.data_path, read.eval_data_path) == (("w",), ("web=w", "code=c"))
    nothing_held_out = RunConfig().override({"data_path": prefix, "split": "1", "load": "runs/a"})
    assert for_evaluation(nothing_held_out, 1).data.eval_data_path == (prefix,)

"""memo.Trainer as a user calls it: records, evaluation, benchmark, refusals, its saved configuration."""

import dataclasses
import gc
import json
import math
import os
import signal
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import write_corpus
from ranks import run_ranks
from torch import Tensor
from trainers import SMALL_RUN

import memo
from memo.config.flags import parse_run
from memo.data import CorpusFacts, MockDataset, build_corpus
from memo.errors import ConfigError, DataError, MemoError
from memo.train.metrics import StepRecord
from memo.train.trainer import Trainer


def small_trainer(**overrides: Any) -> Trainer:
    values = {"mock_data": "train_data" not in overrides and "data_path" not in overrides, "train_iters": 4}
    return memo.Trainer("gpt-tiny", **{**SMALL_RUN, **values, **overrides})


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    text = folder / "text.txt"
    text.write_text("All happy families are alike; each unhappy family is unhappy in its own way.\n" * 40)
    build_corpus([text], folder / "tolstoy")
    return folder / "tolstoy"


def test_trains_on_a_corpus_and_tells_every_step(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records: list[StepRecord] = []
    log = tmp_path / "logs" / "run.jsonl"
    trainer = small_trainer(train_data=corpus, callbacks=[records.append], log_jsonl=str(log), train_iters=6)
    last = trainer.train()
    assert last.last == records[-1] and len(records) == 6
    assert trainer.config.model.vocab_size == 257  # the corpus's tokenizer decides
    assert records[0].lm_loss == pytest.approx(math.log(257), abs=0.3)
    assert records[-1].lm_loss < records[0].lm_loss - 0.5
    assert [r.iteration for r in records] == [1, 2, 3, 4, 5, 6]
    assert [r.consumed_samples for r in records] == [4 * i for i in range(1, 7)]
    # Full precision: what was written is what the callbacks got.
    assert [json.loads(line) for line in log.read_text().splitlines()] == [dataclasses.asdict(r) for r in records]
    for record in records:
        assert record.tgs == pytest.approx(4 * 64 / record.step_time_s, rel=1e-12)
        assert record.mfu_percent is None  # of a CPU there is no peak
        assert record.grad_norm > 0 and record.device_peak_bytes > 0 and record.host_peak_bytes > 0
        assert (record.skipped_iterations, record.nan_iterations) == (0, 0)
    lines = [line for line in capsys.readouterr().out.splitlines() if " iteration " in line]
    assert len(lines) == 6 and f" iteration 3/6 | loss {records[2].lm_loss:.4f} | " in lines[2]


def test_a_failing_callback_ends_the_run() -> None:
    def fail(record: StepRecord) -> None:
        raise KeyError(record.iteration)

    with pytest.raises(KeyError, match="1"):
        small_trainer(callbacks=[fail]).train()


def test_evaluation_is_repeatable() -> None:
    trainer = small_trainer(eval_interval=1, eval_iters=2)
    values: list[float] = []
    trainer.callbacks.append(lambda _: values.extend((trainer.evaluate(), trainer.evaluate(iters=3))))
    trainer.train()
    assert values[-2] == trainer.evaluate() and values[-1] == trainer.evaluate(iters=3)
    assert values[-2] != values[-1] and values[-2] < values[0]


def test_evaluation_reads_its_own_data() -> None:
    held_out = MockDataset(257, 64, seed=99)
    first_loss = small_trainer(train_data=held_out).step().lm_loss  # before its update
    # A step adds the losses of its microbatches in fp32, an evaluation in fp64.
    assert small_trainer(eval_data=held_out).evaluate(iters=1) == pytest.approx(first_loss, rel=1e-6)
    assert small_trainer().step().lm_loss != first_loss
    with pytest.raises(ConfigError, match=r"evaluate\(\) needs evaluation data: give --eval-data-path or eval_data="):
        small_trainer().evaluate()


def test_a_trainer_without_user_is_freed() -> None:
    """Weights, gradients and moments go with it: a program may train many models, one after the other."""
    trainer = small_trainer()
    trainer.step()
    gone = weakref.ref(trainer.parts.data_parallel)
    del trainer
    gc.collect()
    assert gone() is None


def test_benchmark() -> None:
    trainer = small_trainer()
    result = trainer.benchmark(steps=3, warmup=1)
    assert result.steps == 3 and trainer.iteration == 4
    assert result.tgs == pytest.approx(4 * 64 / result.step_time_s, rel=1e-12)  # an odd number: one median step
    assert result.mfu_percent is None
    assert result.device_peak_bytes > 0 and result.host_peak_bytes > 0


def test_data_of_another_length_is_refused() -> None:
    for name in ("train_data", "eval_data"):
        with pytest.raises(ConfigError, match=r"--seq-length is 64, but the samples .* have 128 tokens"):
            small_trainer(**{name: MockDataset(100, 128, 1)}, vocab_size=100)


def test_a_vocabulary_smaller_than_the_corpus_is_refused(corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"--vocab-size 100 is smaller than the tokenizer's 257"):
        small_trainer(train_data=corpus, vocab_size=100)
    with pytest.raises(ConfigError, match=r"--vocab-size is 100, but .*tolstoy.json says .* 257 tokens"):
        small_trainer(eval_data=corpus, vocab_size=100)
    assert CorpusFacts.load(corpus).vocab_size == 257


def strange_corpus(folder: Path) -> str:
    """Ids 0 to 255, but for one that a vocabulary of 256 lacks; nothing says which vocabulary it was built with."""
    ids = np.arange(4000) % 256
    ids[1234] = 257
    return write_corpus(folder / "strange", [ids])


def train_on_strange_ids(prefix: str, tp: int) -> str:
    with pytest.raises(DataError) as caught:
        small_trainer(train_data=prefix, vocab_size=256, tp=tp, global_batch_size=8, train_iters=40).train()
    return str(caught.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_an_id_that_the_model_has_no_row_for_is_told_by_every_rank_that_reads_it(tmp_path: Path, tp: int) -> None:
    """Not as an IndexError, and not in silence where the vocabulary is split."""
    for told in run_ranks(tp, train_on_strange_ids, strange_corpus(tmp_path), tp):
        assert told.startswith(f"{tmp_path}/strange.bin, document 0, token 1234 (position ")
        assert "the id is 257, but the model's vocabulary has 256 tokens" in told


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"load": "/nowhere/at/all"}, "latest_checkpointed_iteration.txt is not there"),
        (
            {"train_data": "/nowhere/corpus"},
            r"--data-path /nowhere/corpus: there is no /nowhere/corpus.bin and /nowhere/corpus.idx",
        ),
        ({"save": __file__}, r"--save .*: .*\.py is no directory that can be written: give another path"),
        ({"save": f"{__file__}/x/y"}, r"--save .*/x/y: .*\.py is no directory that can be written"),
        ({"log_jsonl": str(Path(__file__).parent)}, r"--log-jsonl .* is no file that can be written"),
    ],
    ids=["load", "corpus", "save", "save-below", "log"],
)
def test_refusals_come_before_training(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(MemoError, match=message):
        small_trainer(**overrides)


def test_steps_that_are_not_finite_are_counted_and_training_goes_on() -> None:
    records: list[StepRecord] = []
    small_trainer(lr=1e38, lr_decay_style="constant", callbacks=[records.append]).train()
    assert [r.iteration for r in records] == [1, 2, 3, 4]
    assert [r.skipped_iterations for r in records] == [0, 1, 2, 3]
    assert records[-1].nan_iterations == sum(math.isnan(r.lm_loss) for r in records)


def test_a_request_to_stop_is_not_lost_while_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM between this rank's answer and the others' counts after the next step."""

    def interrupted(x: Tensor, group: None, op: str = "sum") -> Tensor:
        if op == "sum" and trainer.iteration == 0:  # the message of a step
            os.kill(os.getpid(), signal.SIGTERM)
        return x

    trainer = small_trainer()
    monkeypatch.setattr("memo.train.agreement.all_reduce", interrupted)
    before = signal.getsignal(signal.SIGTERM)
    record = trainer.train()
    assert record is not None and record.iteration == 2
    assert signal.getsignal(signal.SIGTERM) == before


def _slow_imports(layout: dict[str, object], save: str) -> set[str]:
    at_start = set(sys.modules)
    small_trainer(save=save, train_iters=1, **layout).train()
    later = sys.modules.keys() - at_start
    return {"torch._dynamo", "torch.distributed.tensor", "torch.onnx"} & sys.modules.keys() | {"sympy"} & later


@pytest.mark.parametrize(
    "layout", [{"tp": 2, "offload_alpha": 0.5, "offload_tiles": 2}, {"pp": 2}, {"offload_states": "optimizer"}], ids=str
)
def test_training_imports_nothing_that_is_for_compilers(layout: dict[str, object], tmp_path: Path) -> None:
    """torch._dynamo takes as long to import as torch; the optimizers of torch, DTensor and checkpoint() need it.

    Nor is sympy, of torch.autograd.grad, imported once training has begun: a layer's backward would be timed with it.
    """
    assert run_ranks(2, _slow_imports, layout, str(tmp_path)) == [set(), set()]


def test_saved_configuration_gives_the_same_run(corpus: Path, tmp_path: Path) -> None:
    trainer = small_trainer(train_data=corpus, save=str(tmp_path), train_iters=1)
    trainer.train()
    reloaded = parse_run(["--config", str(tmp_path / "config.toml")], prog="memo train")
    assert reloaded == trainer.config
    assert reloaded.data.data_path == (str(corpus),) and reloaded.training.params_dtype == "fp32"
    again = parse_run(["--config", str(tmp_path / "config.toml"), "--lr", "0.5"], prog="memo train")
    assert again == trainer.config.override({"lr": 0.5})

"""`memo evaluate`: a directory of Hugging Face and a checkpoint of memo give the same figures, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from pairs import some_pairs, write_pairs
from refusals import refusal
from trainers import SMALL_RUN

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.cli.main import main
from memo.data import build_corpus

SMALL: dict[str, Any] = {
    **SMALL_RUN,
    "ffn_hidden_size": 48,
    "train_iters": 3,
    "params_dtype": "fp64",
    "offload_alpha": 0.5,
    "offload_tiles": 4,
    "eval_interval": 3,
    "eval_iters": 2,
}
TEXT = "All happy families are alike; each unhappy family is unhappy in its own way.\n"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR/run, a run with checkpoints; DIR/model, the same for Hugging Face; DIR/corpus and DIR/other; DIR/expected."""
    folder = tmp_path_factory.mktemp("evaluate")
    for name, count in (("corpus", 60), ("other", 50)):
        (folder / f"{name}.txt").write_text(TEXT * count)
        build_corpus([folder / f"{name}.txt"], folder / name)
    data = {"train_data": folder / "corpus", "eval_data": folder / "other", "eval_data_path": str(folder / "other")}
    with Trainer("llama-tiny", save=str(folder / "run"), **data, **SMALL) as trainer:
        trainer.train()
        expected = trainer.evaluate_positions(2)
    (folder / "expected").write_text(json.dumps([expected.loss, expected.table()]))
    export_checkpoint(folder / "run", folder / "model")
    return folder


def evaluate(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["evaluate", *argv, "--num-threads", "1", "--device", "cpu"]) == 0
    return capsys.readouterr().out


def test_a_run_is_evaluated_on_the_data_that_it_held_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss, table = json.loads((run / "expected").read_text())
    before = sorted(path.name for path in (run / "run").rglob("*"))
    out = run / "figures.json"
    printed = evaluate(
        capsys, "--load", f"{run}/run", "--needle", "--out", str(out),
        "--num-needles", "3", "--key-length", "2", "--value-length", "1",
    )  # fmt: skip
    assert table in printed and "found" in printed
    found = json.loads(out.read_text())
    assert found["iteration"] == 3
    assert found["positions"]["loss"] == pytest.approx(loss, rel=1e-12)  # fp64, plain layers instead of swapping ones
    assert sum(bucket["num_questions"] for bucket in found["needles"]["buckets"]) == 2 * 4 * 3
    assert 0 <= found["needles"]["accuracy"] < 0.5
    assert sorted(path.name for path in (run / "run").rglob("*")) == before  # nothing saved, nothing logged


def test_a_hugging_face_directory_gives_the_same_figures(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, table = json.loads((run / "expected").read_text())
    common = ["--seq-len", "64", "--gbs", "4", "--eval-iters", "2", "--dtype", "fp64", "--tokenizer", "byte"]
    printed = evaluate(capsys, "--model", str(run / "model"), "--data-path", str(run / "other"), *common)
    assert table in printed


def test_an_adapter_beside_its_model_gives_the_figures_of_its_run(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = "num_layers", "hidden_size", "ffn_hidden_size"
    given = {name: value for name, value in SMALL.items() if name not in sizes}
    adapted = {"lora_rank": 2, "train_data": run / "corpus", "eval_data": run / "other", "save": str(tmp_path / "run")}
    with Trainer(str(run / "model"), **given | adapted | {"lr": 0.1}) as trainer:
        trainer.train()
        table = trainer.evaluate_positions(2).table()
    export_checkpoint(tmp_path / "run", tmp_path / "adapter")
    common = ["--seq-len", "64", "--gbs", "4", "--eval-iters", "2", "--dtype", "fp64"]
    data = ["--data-path", str(run / "other")]
    model = ["--model", str(run / "model"), "--lora-rank", "2", "--lora-checkpoint", str(tmp_path / "adapter")]
    assert table in evaluate(capsys, *model, *data, *common)


@pytest.mark.parametrize("command", ["evaluate", "generate"])
def test_another_model_beside_a_run_is_refused(run: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Its weights would not be read. The run's own model may be named again: test_train_placement does."""
    for name in (str(run / "model"), "qwen3-tiny"):
        message = refusal([command, "--load", f"{run}/run", "--model", name], capsys)
        assert f"--model {name} is not the model of the run in --load {run}/run" in message


def test_a_preset_beside_a_run_with_adapters_is_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A directory is not: it may be the base, moved."""
    toml = (run / "run" / "config.toml").read_text()
    (tmp_path / "config.toml").write_text(toml.replace("lora_rank = 0", "lora_rank = 2"))
    message = refusal(["generate", "--load", str(tmp_path), "--model", "qwen3-tiny"], capsys)
    assert f"--model qwen3-tiny is not the model of the run in --load {tmp_path}" in message
    own = ["--num-layers", "2", "--hidden-size", "32", "--ffn-hidden-size", "48"]
    own += ["--prompt", "a"]
    message = refusal(["generate", "--load", str(tmp_path), "--model", "llama-tiny", *own], capsys)
    assert "so it holds no whole checkpoint" in message


def test_what_a_run_was_trained_on_is_told(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, told in (["--eval-data-path", "None"], True), (["--eval-data-path", f"{run}/other"], False):
        argv = ["evaluate", "--load", f"{run}/run", *words, "--num-threads", "1", "--device", "cpu"]
        assert main(argv) == 0
        warning = f"warning: the loss is that of --data-path {run}/corpus, on which the run in --load {run}/run may"
        assert (warning in capsys.readouterr().err) == told


def test_the_pairs_of_a_run_that_learnt_preferences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the run itself tells their loss. It is nothing without a reference, which is said before torch starts."""
    prefix, dpo = write_pairs(tmp_path / "pairs", some_pairs(9, 257), 257), str(tmp_path / "dpo")
    how = {"preference": "dpo", "lora_rank": 2, "data_path": prefix, "eval_data_path": prefix, "save": dpo}
    with Trainer("llama-tiny", **SMALL | how | {"lr": 0.1}) as trainer:
        trainer.train()
        loss = trainer.evaluate()
    assert f"loss of a pair: {loss:.4f}\n" in evaluate(capsys, "--load", dpo) and loss < 0.69
    for flags, found in ((["--lora-rank", "0"], "all weights were trained"), (["--preference", "None"], "is None: ")):
        message = refusal(["evaluate", "--load", dpo, *flags], capsys)
        assert message.startswith(f"--eval-data-path {prefix} holds pairs of a chosen and") and found in message

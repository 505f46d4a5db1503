"""`memo generate`: a run that has learnt an alphabet by heart, and its export."""

from pathlib import Path
from typing import Any

import pytest
from trainers import SMALL_RUN

from memo import Trainer
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.cli.main import main
from memo.data import build_corpus

ALPHABET = "abcdefgh. "
SIZES: dict[str, Any] = {**SMALL_RUN, "ffn_hidden_size": 48, "global_batch_size": 2, "train_iters": 40, "lr": 2e-2}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DIR/run has learnt an alphabet; DIR/model is the same for Hugging Face."""
    folder = tmp_path_factory.mktemp("generate")
    (folder / "text.txt").write_text(ALPHABET * 100)
    build_corpus([folder / "text.txt"], folder / "corpus")
    with Trainer("llama-tiny", save=str(folder / "run"), train_data=folder / "corpus", **SIZES) as trainer:
        assert trainer.train().lm_loss < 0.5
    return folder


def written(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(["generate", *argv, "--num-threads", "1", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("loaded checkpoint"))


def test_a_run_writes_what_it_has_learnt(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--load", f"{run}/run", "--prompt", "c", "abcd")  # model, tokenizer and length are read there
    assert written(capsys, *flags, "--max-new-tokens", "5") == "cdefgh\nabcdefgh.\n"
    newest = max((run / "run").glob("iter_*"))
    assert written(capsys, "--load", str(newest), *flags[2:], "--max-new-tokens", "5") == "cdefgh\nabcdefgh.\n"
    drawn = written(capsys, *flags, "--max-new-tokens", "5", "--temperature", "50", "--draw-seed", "3")
    assert drawn != "cdefgh\nabcdefgh.\n"
    assert written(capsys, *flags, "--max-new-tokens", "5", "--temperature", "50", "--draw-seed", "3") == drawn


def test_an_exported_model_writes_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export_checkpoint(run / "run", run / "model")
    flags = ("--model", f"{run}/model", "--seq-len", "64", "--prompt", "c", "--max-new-tokens", "4")
    assert written(capsys, *flags) == written(capsys, *flags, "--tokenizer", "byte") == "cdefg\n"


def test_a_chat_needs_a_template(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["generate", "--load", f"{run}/run", "--prompt", "a", "--chat"])
    message = "there is no chat template, as the run has learned no conversations"
    assert refused.value.code == 2 and message in capsys.readouterr().err

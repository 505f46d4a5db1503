"""A log that cannot be written is told once and costs no run; wandb without a key is refused before one starts."""

import importlib.util
import json
import os
import resource
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from trainers import tiny_trainer

import memo
from memo.artifacts.run_log import RunLog
from memo.errors import ConfigError
from memo.train import metrics
from memo.train.metrics import StepRecord


def trainer(**overrides: Any) -> memo.Trainer:
    return tiny_trainer(**{"train_iters": 8, **overrides})


def _train_while_the_log_cannot_grow(log: Path) -> int:
    """Iterations 3 to 5 find no room for their lines, on rank 0."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(record: StepRecord) -> None:
        if record.iteration == 2 and made.mesh.rank == 0:
            resource.setrlimit(resource.RLIMIT_FSIZE, (log.stat().st_size + 40, unlimited[1]))
        if record.iteration == 5:
            resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    made = trainer(log_jsonl=str(log), callbacks=[limit])
    with made:
        made.train()
        return made.iteration


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_log_that_cannot_be_written_is_told_once(
    tmp_path: Path, world_size: int, capfd: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log.jsonl"
    assert run_ranks(world_size, _train_while_the_log_cannot_grow, log) == [8] * world_size
    lines = [json.loads(line)["iteration"] for line in log.read_text().splitlines()]
    assert lines == [1, 2, 6, 7, 8]  # whole lines alone, and on again when there is room
    assert [step.iteration for step in RunLog.load(log).steps] == lines


class Sink:
    def __init__(self, *_: object, **__: object) -> None:
        self.records: list[int] = []

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"{name} cannot be reached")


@pytest.mark.parametrize("what", ["TensorBoard", "WandB"])
def test_a_tracker_that_fails_is_told_once(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Stand-ins for the packages: a writer whose every call fails, and a run that cannot be begun."""
    real = importlib.util.find_spec
    ours = ("tensorboard", "wandb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: "here" if name in ours else real(name, *_))
    if what == "TensorBoard":
        monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Sink))
        flags, told = {"tensorboard_dir": str(tmp_path)}, f"--tensorboard-dir {tmp_path}"
    else:
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setitem(sys.modules, "wandb", Sink())
        flags, told = {"wandb_project": "p"}, "--wandb-project p"
    with trainer(**flags, eval_interval=2) as made:
        made.train()
    assert made.iteration == 8
    errors = capsys.readouterr().err
    assert errors.count("\n") == 1 and errors.startswith(f"warning: {told} cannot be written (")
    assert "cannot be reached" in errors and "training goes on" in errors


def test_a_log_that_cannot_be_opened_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Between the check before the start and the first step."""
    log = tmp_path / "log.jsonl"
    with trainer(log_jsonl=str(log)) as made:
        log.mkdir()
        made.train()
    assert made.iteration == 8
    errors = capsys.readouterr().err
    assert errors.startswith(f"warning: the log {log} cannot be written (") and errors.count("\n") == 1


def test_standard_output_that_nobody_reads_costs_no_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Broken:
        def write(self, _: str) -> int:
            raise BrokenPipeError(32, "Broken pipe")

        def flush(self) -> None:
            raise BrokenPipeError(32, "Broken pipe")

    with trainer() as made, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Broken())
        made.print_header()
        made.train()
    assert made.iteration == 8
    assert capsys.readouterr().err.startswith("warning: standard output cannot be written ([Errno 32] Broken pipe)")


@pytest.fixture
def wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment in which wandb is installed and knows nothing; its home directory."""
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: "here" if name == "wandb" else real(name, *_))
    for name in [name for name in os.environ if name.startswith("WANDB_")] + ["NETRC"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _starts() -> bool:
    try:
        trainer(wandb_project="p").close()
    except ConfigError as error:
        assert str(error).startswith("--wandb-project p needs a key for https://")
        assert "WANDB_API_KEY" in str(error) and "WANDB_MODE=offline" in str(error)
        return False
    return True


def test_wandb_without_a_key_is_refused(wandb: Path) -> None:
    assert not _starts()
    (wandb / ".netrc").write_text("machine api.other.ai login user password x\nnot a netrc")
    assert not _starts()


@pytest.mark.parametrize(
    ("name", "value"), [("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled"), ("WANDB_API_KEY", "x" * 40)]
)
def test_wandb_is_told_by_the_environment(wandb: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    assert _starts()


def test_wandb_is_told_by_its_files(wandb: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (wandb / ".netrc").write_text("machine api.wandb.ai\n  login user\n  password " + "x" * 40 + "\n")
    (wandb / ".netrc").chmod(0o600)
    assert _starts()
    monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.here")
    assert not _starts()
    (wandb / "wandb").mkdir()
    (wandb / "wandb" / "settings").write_text("[default]\nmode = offline\n")  # `wandb offline` writes it
    assert _starts()
    monkeypatch.setenv("WANDB_MODE", "online")
    assert not _starts()


def test_only_a_whole_line_or_none_is_in_a_log(tmp_path: Path) -> None:
    """A disk that is full within a line."""
    unlimited, path = resource.getrlimit(resource.RLIMIT_FSIZE), tmp_path / "log.jsonl"
    path.write_text('{"iteration": 1}\n')
    sink = metrics.JsonLines.__new__(metrics.JsonLines)
    sink.file = open(path, "ab", buffering=0)  # noqa: SIM115  as it holds it
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, unlimited[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError):
                sink.evaluated(2, "", 1.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert path.read_text() == '{"iteration": 1}\n'
    sink.evaluated(3, "", 1.0)
    sink.close()
    assert len(path.read_text().splitlines()) == 2

"""`memo report` on a run that really trained, and what it refuses."""

from pathlib import Path

import pytest
from run_logs import step, write_log

from memo.artifacts.run_log import RunLog
from memo.cli.main import main

FLAGS = (
    "--num-layers 3 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 "
    "--train-iters 3 --log-interval 2 --offload-alpha 0.5 --device cpu --num-threads 1 --peak-tflops 1 --no-progress "
    "--numa-binding off"
)


def test_a_run_is_drawn_from_its_save_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *FLAGS.split(), "--save", str(tmp_path / "mine")]) == 0
    assert main(["report", str(tmp_path / "mine")]) == 0
    folder = tmp_path / "mine" / "report"
    assert f"written: {folder / 'index.html'}, with 5 pictures" in capsys.readouterr().out
    page = (folder / "index.html").read_text()
    log = RunLog.load(tmp_path / "mine")
    assert f"<td>last loss</td><td>{log.steps[-1].lm_loss:.4f}</td>" in page
    assert "<h1>Training run mine</h1>" in page and "Not drawn" not in page
    assert [record.hidden_share is not None for record in log.steps] == [False, True, False]


def test_runs_of_one_name_are_told_apart_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("a", "b"):
        write_log(tmp_path / name / "log.jsonl", [step(1)])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("memo.report.run_page.draw_runs", lambda runs: [])
    assert main(["report", "a/log.jsonl", "b/log.jsonl", "--out", "both"]) == 0
    page = (tmp_path / "both" / "index.html").read_text()
    assert "<h1>2 training runs</h1>" in page
    assert "<th></th><th>a/log.jsonl</th><th>b/log.jsonl</th>" in page
    assert main(["report", "a", "b", "--out", "both"]) == 0
    assert "<th>a</th><th>b</th>" in (tmp_path / "both" / "index.html").read_text()


def test_names_with_dollars_are_no_formulas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a$b{$", "c$x_$"):
        write_log(tmp_path / name / "log.jsonl", [step(1)])
    monkeypatch.chdir(tmp_path)
    assert main(["report", "a$b{$", "c$x_$", "--out", "both"]) == 0

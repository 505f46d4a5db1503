"""Logs of runs: what counts after a resume or a kill, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from run_logs import header, old_step, step, write_log

from memo.artifacts.run_log import RunHeader, RunLog, default_log, header_path
from memo.errors import ArtifactError


def test_a_directory_or_the_file_itself(tmp_path: Path) -> None:
    path = write_log(tmp_path / "log.jsonl", [step(1), step(2)], header())
    for run in (tmp_path, path, str(path)):
        log = RunLog.load(run)
        assert (log.path, log.steps, log.header, log.repeated) == (path, (step(1), step(2)), header(), 0)


def test_after_a_resume_the_later_lines_count(tmp_path: Path) -> None:
    """Five steps, then from a checkpoint at 3 again, killed after the fourth: the old fifth is of another run."""
    lines = [*(step(i) for i in range(1, 6)), step(4, lm_loss=1.0)]
    log = RunLog.load(write_log(tmp_path / "log.jsonl", lines))
    assert log.steps == (step(1), step(2), step(3), step(4, lm_loss=1.0)) and log.repeated == 2


def test_a_fresh_run_in_the_same_place_replaces_the_old_one(tmp_path: Path) -> None:
    log = RunLog.load(write_log(tmp_path / "log.jsonl", [step(1), step(2), step(1, lr=0.5)]))
    assert log.steps == (step(1, lr=0.5),) and log.repeated == 2


def test_evaluations_stand_beside_the_steps_and_are_replaced_with_them(tmp_path: Path) -> None:
    found = [{"iteration": i, "evaluation": {"loss": loss}} for i, loss in ((2, 5.0), (4, 4.5))]
    lines = [step(1), step(2), found[0], step(3), step(4), found[1], step(3), step(4)]
    log = RunLog.load(write_log(tmp_path / "log.jsonl", lines))
    assert log.evaluations == ((2, 5.0),) and [record.iteration for record in log.steps] == [1, 2, 3, 4]
    assert log.repeated == 2


def test_evaluations_of_an_earlier_run_in_the_same_place_go(tmp_path: Path) -> None:
    """The new run begins with an evaluation, before its first step."""
    old = [{"iteration": i, "evaluation": {"loss": loss}} for i, loss in ((0, 9.0), (2, 8.0))]
    new = [{"iteration": i, "evaluation": {"loss": loss}} for i, loss in ((0, 7.0), (1, 6.0))]
    lines = [old[0], step(1), step(2), old[1], new[0], step(1), new[1]]
    assert RunLog.load(write_log(tmp_path / "log.jsonl", lines)).evaluations == ((0, 7.0), (1, 6.0))


def test_half_a_line_at_the_end_is_passed_over(tmp_path: Path) -> None:
    log = RunLog.load(write_log(tmp_path / "log.jsonl", [step(1), '{"iteration": 2, "lm_lo']))
    assert log.steps == (step(1),)


def test_logs_of_older_and_of_newer_versions_can_be_read(tmp_path: Path) -> None:
    log = RunLog.load(write_log(tmp_path / "log.jsonl", [old_step(1), {**old_step(2), "something_new": [1]}]))
    assert [record.weights_bytes for record in log.steps] == [None, None] and log.header is None


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no iteration yet: wait for the run's first step"),
        (['{"iteration": 1', "\n", step(1)], r"log.jsonl, line 1: is not JSON"),
        ([{"iteration": 1}], r"line 1: has no field consumed_samples: give a file that --log-jsonl wrote"),
        (["[1, 2]\n", step(1)], "line 1: holds a list, not an object"),
        ([step(1), {"iteration": 1, "evaluation": {}}], r"line 2: evaluation.loss is None"),
        (
            [{**old_step(1), "iteration": "1"}],
            "line 1: iteration is '1' .a string.: give a whole number of 0 or more, or ",
        ),
        ([{**old_step(1), "weights_bytes": 0.5}], r"line 1: weights_bytes is 0.5"),
        ([{**old_step(1), "lm_loss": True}], "line 1: lm_loss is True"),
    ],
)
def test_lines_that_are_no_iterations(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        RunLog.load(write_log(tmp_path / "log.jsonl", lines))


def test_places_without_a_log(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"holds no log.jsonl: give the file that the run's --log-jsonl named"):
        RunLog.load(tmp_path)
    with pytest.raises(ArtifactError, match=r"none.jsonl: the file does not exist: give the --save directory of a run"):
        RunLog.load(tmp_path / "none.jsonl")
    (tmp_path / "log.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(ArtifactError, match=r"is not text in UTF-8 .*: give a file that --log-jsonl wrote"):
        RunLog.load(tmp_path)


def test_headers(tmp_path: Path) -> None:
    for written in (header(), header(swap=None, memory_plan={"planner": "paper", "arena_bytes": 5})):
        written.save(tmp_path / "a.run.json")
        assert RunHeader.load(tmp_path / "a.run.json") == written
    text = (tmp_path / "a.run.json").read_text()
    for broken in (text.replace('"device"', '"gadget"'), text.replace('"parameters": 123456789', '"parameters": "x"')):
        (tmp_path / "a.run.json").write_text(broken)
        with pytest.raises(ArtifactError, match=r"a\.run\.json: "):
            RunHeader.load(tmp_path / "a.run.json")


def test_where_a_run_writes() -> None:
    assert default_log(None, None) is None
    assert default_log("runs/a", None) == "runs/a/log.jsonl"
    assert default_log("runs/a", "other.jsonl") == "other.jsonl"
    assert header_path("runs/a/log.jsonl") == Path("runs/a/log.run.json")

"""A rank that dies, raises or stops: the others say which was the first and why, and end; nobody waits for ever."""

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from forked import Kind
from processes import SMALL, Ranks, by_hand

from memo.errors import EXIT_FAILED, EXIT_REFUSED
from memo.train.watchdog import message_failure

MEMO: tuple[Kind, str] = ("module", "memo")
TRAIN = ["train", *SMALL.split()]
RANK_1 = r"rank 1 \(\S+, tp 1 cp 0 pp 0 dp 0\)"
RANK_0 = r"rank 0 \(\S+, tp 0 cp 0 pp 0 dp 0\)"

RAISES = """
import os, sys, time
from memo.errors import DataError, exit_on_error, is_reporting_rank
from memo.config.flags import load_run
from memo.train.trainer import Trainer

_, how, *flags = sys.argv


def fault(record):
    if os.environ["RANK"] == "1" and record.iteration == 3:
        if how == "bug":
            raise KeyError("a fault of memo")
        if how == "late":
            time.sleep(3600)
        raise DataError("corpus.bin: document 7 is damaged: build it again")


with exit_on_error(), Trainer(config=load_run(flags), callbacks=[fault]) as trainer:
    trainer.train()
"""


def beats(folder: Path) -> int:
    path = folder / "beat.json"
    return json.loads(path.read_text())["iteration"] if path.exists() else 0


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "raises.py"
    path.write_text(RAISES)
    return str(path)


def flags(folder: Path, *more: str) -> list[str]:
    return ["--tp", "2", "--heartbeat-file", str(folder / "beat.json"), *more]


def trains(ranks: Ranks, folder: Path) -> None:
    ranks.wait_until(lambda: beats(folder) > 1, "the second step")


def has_no_traceback(errors: str) -> bool:
    return "Traceback" not in errors and "File " not in errors


def test_ranks_that_were_started_by_hand_end_without_a_word(tmp_path: Path) -> None:
    """The store of such a run lies in rank 0, and is there until all have done with it."""
    with by_hand(2, tmp_path, MEMO, [*TRAIN, *flags(tmp_path), "--train-iters", "2"]) as ranks:
        ends = ranks.ended(0), ranks.ended(1)
    assert [(end.status, end.errors) for end in ends] == [(0, "")] * 2


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_is_named_by_the_other(tmp_path: Path, victim: int) -> None:
    """Rank 0 keeps the store: with it even the way to tell is gone."""
    with by_hand(2, tmp_path, MEMO, [*TRAIN, *flags(tmp_path)]) as ranks:
        trains(ranks, tmp_path)
        ranks.processes[victim].kill()
        survivor = ranks.ended(1 - victim)
    assert survivor.status == EXIT_FAILED and has_no_traceback(survivor.errors), survivor.errors
    names = RANK_0, RANK_1
    assert re.search(rf"^{names[1 - victim]}: error: {names[victim]} left first: ", survivor.errors, re.M), (
        survivor.errors
    )


def test_an_error_of_one_rank_is_told_by_it_and_named_by_the_other(tmp_path: Path, script: str) -> None:
    with by_hand(2, tmp_path, ("file", script), ["data", *SMALL.split(), *flags(tmp_path)]) as ranks:
        failed, other = ranks.ended(1), ranks.ended(0)
    cause = r"corpus\.bin: document 7 is damaged: build it again"
    assert (failed.status, other.status) == (EXIT_FAILED, EXIT_FAILED)
    assert re.search(rf"^{RANK_1}: error: {cause}$", failed.errors, re.M), failed.errors
    assert re.search(rf"^{RANK_0}: error: {RANK_1} left first: {cause}", other.errors, re.M), other.errors
    assert has_no_traceback(failed.errors + other.errors)


def test_a_bug_shows_its_traceback_once(tmp_path: Path, script: str) -> None:
    with by_hand(2, tmp_path, ("file", script), ["bug", *SMALL.split(), *flags(tmp_path)]) as ranks:
        failed, other = ranks.ended(1), ranks.ended(0)
    assert failed.status != 0 and failed.errors.count("KeyError: 'a fault of memo'\n") == 1, failed.errors
    told = rf"^{RANK_0}: error: {RANK_1} left first: KeyError: 'a fault of memo'"
    assert other.status == EXIT_FAILED and re.search(told, other.errors, re.M), other.errors
    assert has_no_traceback(other.errors) and "gloo" not in failed.errors + other.errors


def test_a_stopped_rank_is_lost_after_the_time_that_was_set_and_not_before(tmp_path: Path) -> None:
    timeout_s = 12.0
    with by_hand(
        2, tmp_path, MEMO, [*TRAIN, *flags(tmp_path, "--distributed-timeout-minutes", str(timeout_s / 60))]
    ) as ranks:
        trains(ranks, tmp_path)
        ranks.processes[1].send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        survivor = ranks.ended(0)
        waited_s = time.monotonic() - stopped_s
    assert survivor.status == EXIT_FAILED and has_no_traceback(survivor.errors.split("What every thread")[0])
    assert waited_s > timeout_s - 2.0  # it had been silent for up to a pulse when it was stopped
    assert re.search(rf"^{RANK_0}: error: {RANK_1} left first: ", survivor.errors, re.M), survivor.errors
    hang = re.search(
        rf"^{RANK_0}: nothing has happened for 1\d s in step \d+ \(its last message: .*\)\. What", survivor.errors, re.M
    )
    assert hang is not None, survivor.errors
    assert "thread MainThread:" in survivor.errors and "train_step" in survivor.errors


def test_a_rank_that_hangs_shows_where_before_the_time_is_over(tmp_path: Path, script: str) -> None:
    """It lives, so nobody takes it for lost; but a message cannot wait for it any longer."""
    more = ("--distributed-timeout-minutes", "0.2")
    with by_hand(2, tmp_path, ("file", script), ["late", *SMALL.split(), *flags(tmp_path, *more)]) as ranks:
        waiting = ranks.ended(0)
        late = ranks.ended(1)
    assert waiting.status == late.status == EXIT_FAILED
    assert "within --distributed-timeout-minutes 0.2" in waiting.errors, waiting.errors
    assert re.search(rf"^{RANK_1}: error: {RANK_0} left first: no rank has left", late.errors, re.M), late.errors


@pytest.mark.parametrize(
    "wrong, cause",
    [(["--load", "nowhere"], "--load nowhere"), (["--lrr", "1"], "its flags are refused, look at its own message")],
    ids=["a missing checkpoint", "no such flag"],
)
def test_a_refusal_of_one_rank_reaches_those_that_would_wait_for_it(
    tmp_path: Path, wrong: list[str], cause: str
) -> None:
    with by_hand(2, tmp_path, MEMO, [*TRAIN, *flags(tmp_path)], {1: wrong}) as ranks:
        refused, other = ranks.ended(1), ranks.ended(0)
    assert refused.status == EXIT_REFUSED and re.match(r"error: .*--l", refused.errors), refused.errors
    assert other.status == EXIT_FAILED, other.errors
    assert re.search(rf"^error: rank 1 \(\S+\) has not started: {cause}", other.errors, re.M), other.errors
    assert has_no_traceback(refused.errors + other.errors)


def test_ranks_with_other_flags_than_rank_0_are_refused(tmp_path: Path) -> None:
    other = ["--lr", "2e-3", "--add-bias-linear", "--heartbeat-file", str(tmp_path / "of its own.json")]
    with by_hand(2, tmp_path, MEMO, [*TRAIN, *flags(tmp_path)], {1: other}) as ranks:
        refused, first = ranks.ended(1), ranks.ended(0)
    says = (
        r"--add-bias-linear is True on rank 1, but False on rank 0; --lr is 0\.002 on rank 1, but 0\.001 on rank 0: "
        "start all ranks of a run with the same flags"
    )
    assert (refused.status, first.status) == (EXIT_REFUSED, EXIT_FAILED)
    assert re.search(rf"^{RANK_1}: error: {says}$", refused.errors, re.M), refused.errors
    assert re.search(rf"^{RANK_0}: error: {RANK_1} left first: {says}", first.errors, re.M), first.errors


def test_ranks_that_never_come_are_named(tmp_path: Path) -> None:
    command = [*TRAIN, "--global-batch-size", "6"]
    with by_hand(3, tmp_path, MEMO, [*command, "--distributed-timeout-minutes", "0.15"]) as ranks:
        os.kill(ranks.processes[2].pid, signal.SIGKILL)
        first, second = ranks.ended(0), ranks.ended(1)
    for left in (first, second):
        assert left.status == EXIT_FAILED and has_no_traceback(left.errors), left.errors
    assert "ranks 2 of 3 did not come within --distributed-timeout-minutes 0.15" in first.errors


@pytest.mark.parametrize(
    "words",
    [
        "Application timeout caused pair closure",
        "[../gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:1234",
        "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 20000ms for recv operation to complete",
        "NCCL communicator was aborted on rank 1.",
    ],
)
def test_an_error_of_a_message_is_known_by_its_words(words: str) -> None:
    error = KeyError("met while handling the other")
    error.__context__ = RuntimeError(words)
    assert message_failure(error) == f"RuntimeError: {words}"
    assert message_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied")) is None

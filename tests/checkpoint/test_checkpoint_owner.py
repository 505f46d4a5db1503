"""One owner of a --save directory at a time: who holds it is told, who is dead is recognised."""

import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from memo.checkpoint import owner as module
from memo.checkpoint.owner import OWNER, Owner, claim
from memo.errors import CheckpointError

ROOT = Path(__file__).parents[2]


def silent(_: str) -> None:
    pass


def holds(folder: Path, **changes: object) -> Owner:
    """A file of an owner like this process, but for `changes`."""
    owner = dataclasses.replace(Owner.here(), **changes)
    (folder / OWNER).write_text(json.dumps(dataclasses.asdict(owner)))
    return owner


def current(folder: Path) -> Owner:
    return Owner(**json.loads((folder / OWNER).read_text()))


def test_it_is_made_with_the_directory_and_gone_after_release(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    owned = claim(folder, silent)
    assert (current(folder).pid, current(folder).host) == (os.getpid(), os.uname().nodename)
    owned.check()
    owned.release()
    assert list(folder.iterdir()) == []
    owned.release()  # a second time does nothing
    claim(folder, silent).release()


HOLDER = """
import sys, time
from memo.checkpoint.owner import claim
owned = claim(sys.argv[1], print)
print("held", flush=True)
time.sleep(600)
"""


def test_a_living_process_is_named_and_a_killed_one_is_replaced_at_once(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        since = current(tmp_path).since
        message = rf"--save {tmp_path} belongs to another run, process {holder.pid} of .* on .*, since {since}: wait"
        with pytest.raises(CheckpointError, match=message.replace("+", r"\+")):
            claim(tmp_path, silent)
        holder.send_signal(signal.SIGSTOP)  # stands still, but lives
        with pytest.raises(CheckpointError, match="wait for its end, stop it, or give another directory"):
            claim(tmp_path, silent)
        holder.kill()
        while Path(f"/proc/{holder.pid}/stat").read_text().split()[2] != "Z":  # its parent has not asked for it yet
            time.sleep(0.01)
        owned = claim(tmp_path, silent)
    owned.check()
    owned.release()


def test_another_trainer_of_this_process_is_told_to_close(tmp_path: Path) -> None:
    owned = claim(tmp_path, silent)
    with pytest.raises(CheckpointError, match=r"that is this process: close\(\) the Trainer that holds it"):
        claim(tmp_path, silent)
    del owned
    gc.collect()  # a Trainer that nobody has any more
    claim(tmp_path, silent).release()


def test_a_number_that_another_process_has_now_is_no_owner(tmp_path: Path) -> None:
    holds(tmp_path, process_start="17")
    claim(tmp_path, silent).release()


@pytest.mark.parametrize("content", [None, "", "{", '{"pid": [1]}', "\x00" * 99])
def test_one_elsewhere_or_unreadable_is_dead_when_its_file_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.3)
    holds(tmp_path, machine="another", host="node7\x1b[2J\n")
    if content is not None:
        (tmp_path / OWNER).write_text(content)
    told: list[str] = []
    begin_s = time.monotonic()
    owned = claim(tmp_path, told.append)
    assert time.monotonic() - begin_s >= 0.3
    assert len(told) == 1 and f"--save {tmp_path} may belong to another run" in told[0]
    assert (r"on node7\x1b[2J\n, since" in told[0]) is (content is None)
    owned.release()
    assert list(tmp_path.iterdir()) == []


def test_one_elsewhere_that_renews_its_file_lives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STALE_S", 60.0)
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.1)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(module, "machine", lambda: "another")
        elsewhere.setattr(module.socket, "gethostname", lambda: "node7")
        owned = claim(tmp_path, silent)
    begin_s = time.monotonic()
    with pytest.raises(CheckpointError, match=r"process \d+ of .* on node7, since"):
        claim(tmp_path, silent)
    assert time.monotonic() - begin_s < 30.0
    owned.release()


HIDDEN = """
import os, subprocess, sys
from memo.artifacts.processes import process_start
process_start(os.getpid())  # loads what this user alone may load
subprocess.run(["mount", "-t", "proc", "-o", "hidepid=" + sys.argv[1], "proc", "/proc"], check=True)
os.setgroups([]); os.setgid(65534); os.setuid(65534)
print(process_start(os.getppid()), process_start(999999999) == "", process_start(os.getpid()) != "")
"""


@pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode != 0,
    reason="only root may mount another /proc, in a namespace of its own",
)
@pytest.mark.parametrize("hidepid", ["1", "2"])
def test_a_process_that_the_system_hides_is_not_taken_for_ended(hidepid: str) -> None:
    """The one that is looked up is of root, and the one that asks is of another user."""
    command = ["unshare", "-m", sys.executable, "-c", HIDDEN, hidepid]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "None True True\n", done.stderr


def test_an_owner_whose_process_is_hidden_is_judged_by_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STALE_S", 0.3)
    holds(tmp_path, user="another")
    monkeypatch.setattr(module, "process_start", lambda pid: None)
    told: list[str] = []
    claim(tmp_path, told.append).release()
    assert len(told) == 1 and "may belong to another run, last of process" in told[0]


def test_a_restart_of_the_same_job_takes_over_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun has ended all ranks before it starts them again; rank 0 may be on another node then."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-5")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    holds(tmp_path, machine="another", restart=1)
    owned = claim(tmp_path, silent)
    owned.release()
    holds(tmp_path, machine="another", restart=1, job="job-6")
    monkeypatch.setattr(module, "_is_stale", lambda *_: False)
    with pytest.raises(CheckpointError, match="belongs to another run"):
        claim(tmp_path, silent)


def test_who_lost_the_directory_does_not_write_there(tmp_path: Path) -> None:
    owned = claim(tmp_path, silent)
    thief = holds(tmp_path, pid=1, host="node7")
    with pytest.raises(CheckpointError, match=r"no longer this run's: owner.json names process 1 of .* on node7"):
        owned.check()
    owned.release()
    assert current(tmp_path) == thief  # not ours to remove
    (tmp_path / OWNER).unlink()
    with pytest.raises(CheckpointError, match="names nobody"):
        owned.check()


def test_of_many_that_find_a_dead_owner_one_takes_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand for processes of several nodes."""
    monkeypatch.setattr(module, "STALE_S", 2.0)  # one that finds the file before it is written looks again after 0.2 s
    for _ in range(10):
        holds(tmp_path, process_start="17")
        start, taken, refused = threading.Barrier(8), [], []

        def take() -> None:
            start.wait()  # noqa: B023
            try:
                taken.append(claim(tmp_path, silent))  # noqa: B023
            except CheckpointError:
                refused.append(1)  # noqa: B023

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(taken) == 1 and len(refused) == 7
        taken[0].release()
        assert list(tmp_path.iterdir()) == []


def _forked(owned: module.Ownership) -> None:
    owned.release()


def test_a_forked_child_does_not_give_it_away(tmp_path: Path) -> None:
    owned = claim(tmp_path, silent)
    child = multiprocessing.get_context("fork").Process(target=_forked, args=(owned,))
    child.start()
    child.join()
    owned.check()
    owned.release()

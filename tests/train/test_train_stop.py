"""How real processes end: on SIGTERM and SIGINT after the step with a checkpoint, status 0, and at a second signal at
once; with no thread left behind."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import psutil
import pytest
from forked import ROOT, Kind
from processes import SMALL, Ranks, alone, by_hand, by_torchrun

from memo.checkpoint.directory import has_checkpoint, latest_checkpoint
from memo.train.stop import ECHO_S

EXAMPLE = str(ROOT / "examples" / "pretrain_gpt.py")


def flags(folder: Path, *more: str) -> list[str]:
    return [*SMALL.split(), "--save", str(folder), "--log-jsonl", str(folder / "log.jsonl"), *more]


def memo_train(folder: Path, *more: str) -> AbstractContextManager[Ranks]:
    return alone(folder, ("module", "memo"), ["train", *flags(folder, *more)])


def iterations(folder: Path) -> list[int]:
    log = folder / "log.jsonl"
    if not log.exists():
        return []
    return [json.loads(line)["iteration"] for line in log.read_text().splitlines(keepends=True) if line[-1] == "\n"]


def wait_for_iteration(run: Ranks, iteration: int) -> None:
    run.wait_until(lambda: iteration in iterations(run.folder), f"iteration {iteration}")


def finish(run: Ranks, status: int = 0) -> str:
    """What stands on the standard errors of processes that ended so, without a traceback."""
    ends = [run.ended(i) for i in range(len(run.processes))]
    for end in ends:
        assert end.status == status, end.errors[-3000:]
        assert "Traceback" not in end.errors, end.errors[-3000:]
    return "".join(end.errors for end in ends)


def last_line(run: Ranks) -> str:
    return run.output(0).splitlines()[-1]


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(text)
    return str(path)


BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


@BOTH
def test_a_signal_saves_and_a_second_run_goes_on_from_there(tmp_path: Path, number: signal.Signals) -> None:
    with memo_train(tmp_path) as run:
        wait_for_iteration(run, 3)
        run.processes[0].send_signal(number)
        errors = finish(run)
    assert errors.splitlines()[-1].startswith(f"{number.name}: this run ends after the step that it is in; a second")
    stopped = iterations(tmp_path)[-1]
    assert latest_checkpoint(tmp_path).name == f"iter_{stopped:07d}"
    saved = tmp_path / f"iter_{stopped:07d}"
    assert last_line(run) == (
        f"stopped by {number.name} at iteration {stopped} of 100000, saved as {saved}: "
        f"go on with the same command and --load {tmp_path}"
    )
    with memo_train(tmp_path, "--load", str(tmp_path), "--train-iters", str(stopped + 2)) as run:
        finish(run)
    assert iterations(tmp_path) == list(range(1, stopped + 3))
    assert latest_checkpoint(tmp_path).name == f"iter_{stopped + 2:07d}"


@contextmanager
def two_ranks(launcher: str, folder: Path) -> Iterator[tuple[Ranks, psutil.Process]]:
    """A run after its second step, and the process of rank 1."""
    more = flags(folder, "--tp", "2")
    if launcher == "torchrun":
        with by_torchrun(2, folder, [EXAMPLE, *more]) as run:
            wait_for_iteration(run, 2)
            children = psutil.Process(run.processes[0].pid).children(recursive=True)
            (rank_1,) = (child for child in children if child.environ().get("RANK") == "1")
            yield run, rank_1
    else:
        with by_hand(2, folder, ("file", EXAMPLE), more) as run:
            wait_for_iteration(run, 2)
            yield run, psutil.Process(run.processes[1].pid)


@pytest.mark.parametrize(
    ("number", "launcher"),
    [pytest.param(signal.SIGTERM, "torchrun", marks=pytest.mark.full), (signal.SIGINT, "by hand")],
    ids=["SIGTERM", "SIGINT"],
)
def test_a_signal_to_one_of_two_ranks_stops_both_after_the_same_step(
    tmp_path: Path, number: signal.Signals, launcher: str
) -> None:
    with two_ranks(launcher, tmp_path) as (run, rank_1):
        rank_1.send_signal(number)
        finish(run)
    assert latest_checkpoint(tmp_path).name == f"iter_{iterations(tmp_path)[-1]:07d}"
    assert "stopped by a signal or stop() on another rank at iteration" in last_line(run)


SLOW_SAVE = """
import sys, time
from pathlib import Path
from memo.checkpoint import store
from memo.train.entry import main

marker, pause_s, write = Path(sys.argv[1]), float(sys.argv[2]), store.write_file

def slow(*args):
    marker.touch()
    time.sleep(pause_s)
    return write(*args)

store.write_file = slow
raise SystemExit(main(sys.argv[3:]))
"""


@contextmanager
def saving_slowly(folder: Path, pause_s: float, *more: str) -> Iterator[tuple[Ranks, Path]]:
    """A run whose writes of checkpoints take longer, and the file that appears when one begins."""
    program: tuple[Kind, str] = ("file", script(folder, SLOW_SAVE))
    marker = folder / "saving"
    with alone(folder, program, [str(marker), str(pause_s), *flags(folder, *more)]) as run:
        yield run, marker


@pytest.mark.parametrize(
    ("number", "save"), [(signal.SIGINT, "--no-async-save"), (signal.SIGTERM, "--async-save")], ids=["plain", "beside"]
)
def test_a_signal_during_the_last_save_costs_nothing(tmp_path: Path, number: signal.Signals, save: str) -> None:
    with saving_slowly(tmp_path, 1.0, "--train-iters", "2", save) as (run, marker):
        run.wait_until(marker.exists, "a save")
        run.processes[0].send_signal(number)
        finish(run)
    assert latest_checkpoint(tmp_path).name == "iter_0000002"


@BOTH
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """The first one came amid training, the second while its checkpoint is written."""
    with saving_slowly(tmp_path, 3600.0) as (run, marker):
        wait_for_iteration(run, 2)
        run.processes[0].send_signal(signal.SIGTERM)
        run.wait_until(marker.exists, "a save")
        time.sleep(2 * ECHO_S)
        run.processes[0].send_signal(number)
        errors = finish(run, status=128 + number)
    assert errors.splitlines()[-1] == (
        f"{number.name} after a first signal: rank 0 ends at once, and what it has not saved is lost"
    )
    assert not has_checkpoint(tmp_path)


STUCK = """
import os, sys, time
from pathlib import Path
from memo.parallel.main_gradients import MainGradients
from memo.train.entry import main

finish, calls = MainGradients.finish_reduction, 0

def wrapped(self, *args):
    global calls
    calls += 1
    if calls == 3:
        Path(sys.argv[1], f"rank{os.environ['RANK']}").touch()
        while os.environ["RANK"] == "1":
            time.sleep(1)
    return finish(self, *args)

MainGradients.finish_reduction = wrapped
raise SystemExit(main(sys.argv[2:]))
"""


def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    """In a collective no Python runs, and so no handler either."""
    with by_hand(2, tmp_path, ("file", script(tmp_path, STUCK)), [str(tmp_path), *flags(tmp_path)]) as run:
        for rank in range(2):
            run.wait_until((tmp_path / f"rank{rank}").exists, f"step 3 of rank {rank}")
        time.sleep(0.5)  # rank 0 has come to wait
        run.processes[0].send_signal(signal.SIGINT)
        time.sleep(2 * ECHO_S)
        run.processes[0].send_signal(signal.SIGTERM)
        end = run.ended(0)
    assert end.status == 128 + signal.SIGTERM
    assert "SIGINT: this run ends after the step" in end.errors
    assert "SIGTERM after a first signal: rank 0 ends at once" in end.errors


EARLY = """
import os, signal, sys
import memo.train.run as run
from memo.train.entry import main

build = run.build

def wrapped(*args):
    if os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGINT)
    return build(*args)

run.build = wrapped
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("world_size", [1, 2], ids=["one process", "two ranks"])
def test_a_signal_before_the_first_step_ends_the_run_there(tmp_path: Path, world_size: int) -> None:
    program: tuple[Kind, str] = ("file", script(tmp_path, EARLY))
    more = flags(tmp_path)
    with alone(tmp_path, program, more) if world_size == 1 else by_hand(world_size, tmp_path, program, more) as run:
        finish(run)
    assert iterations(tmp_path) == [] and not has_checkpoint(tmp_path)
    assert ", before its first step: nothing new to save; start again with the same command" in last_line(run)


ENDS = """
import contextlib, glob, sys
from memo.train.entry import main
main(sys.argv[1:])
names = []
for path in glob.glob("/proc/self/task/*/comm"):
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        names.append(open(path).read().strip())
assert names and not any("gloo" in name for name in names), names
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in /proc on Linux alone")
@pytest.mark.parametrize("alpha", ["off", "0.5"])
def test_no_thread_of_a_process_group_outlives_training(tmp_path: Path, alpha: str) -> None:
    """One that frees a tensor while the interpreter ends would abort the process, now and then."""
    more = flags(tmp_path, "--train-iters", "1", "--offload-alpha", alpha)
    with by_hand(2, tmp_path, ("file", script(tmp_path, ENDS)), more) as run:
        finish(run)

"""How real processes end: on SIGTERM and SIGINT after the step with a checkpoint, status 0, and at a second signal at
once; with no thread left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from memo.checkpoint import has_checkpoint, latest_checkpoint
from memo.train.stop import ECHO_S

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 "
    "--global-batch-size 4 --train-iters 100000 --lr 1e-3 --lr-decay-style constant --device cpu "
    "--num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000"
)
DEADLINE_S = 300.0
ONE_PROCESS = ["-m", "memo", "train"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@contextmanager
def started(launcher: list[str], folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [
        sys.executable,
        *launcher,
        *FLAGS.split(),
        "--save",
        str(folder),
        "--log-jsonl",
        str(folder / "log.jsonl"),
        *flags,
    ]
    with open(folder / "out.txt", "a") as out:  # a pipe that nobody reads would fill up
        process = subprocess.Popen(command, env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=out)
    try:
        yield process
    finally:
        for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            child.kill()
        process.kill()
        process.wait()


def iterations(folder: Path) -> list[int]:
    log = folder / "log.jsonl"
    if not log.exists():
        return []
    return [json.loads(line)["iteration"] for line in log.read_text().splitlines(keepends=True) if line[-1] == "\n"]


def wait_for_iteration(process: subprocess.Popen[str], folder: Path, iteration: int) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while iteration not in iterations(folder):
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"iteration {iteration} did not come"
        time.sleep(0.05)


def wait_for_file(process: subprocess.Popen[str], path: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    """What stands on standard error of a process that ended so, without a traceback."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, errors[-3000:]
    assert "Traceback" not in errors, errors[-3000:]
    return errors


def last_line(folder: Path) -> str:
    return (folder / "out.txt").read_text().splitlines()[-1]


BOTH = pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])


@BOTH
def test_a_signal_saves_and_a_second_run_goes_on_from_there(tmp_path: Path, number: signal.Signals) -> None:
    with started(ONE_PROCESS, tmp_path) as process:
        wait_for_iteration(process, tmp_path, 3)
        process.send_signal(number)
        errors = finish(process)
    assert errors.splitlines()[-1].startswith(f"{number.name}: this run ends after the step that it is in; a second")
    stopped = iterations(tmp_path)[-1]
    assert latest_checkpoint(tmp_path).name == f"iter_{stopped:07d}"
    saved = tmp_path / f"iter_{stopped:07d}"
    assert last_line(tmp_path) == (
        f"stopped by {number.name} at iteration {stopped} of 100000, saved as {saved}: "
        f"go on with the same command and --load {tmp_path}"
    )
    with started(ONE_PROCESS, tmp_path, "--load", str(tmp_path), "--train-iters", str(stopped + 2)) as process:
        finish(process)
    assert iterations(tmp_path) == list(range(1, stopped + 3))
    assert latest_checkpoint(tmp_path).name == f"iter_{stopped + 2:07d}"


@BOTH
def test_a_signal_to_one_of_two_ranks_stops_both_after_the_same_step(tmp_path: Path, number: signal.Signals) -> None:
    with started([*TORCHRUN, str(ROOT / "examples" / "pretrain_gpt.py")], tmp_path, "--tp", "2") as process:
        wait_for_iteration(process, tmp_path, 2)
        workers = [c for c in psutil.Process(process.pid).children(recursive=True) if c.environ().get("RANK") == "1"]
        assert len(workers) == 1
        workers[0].send_signal(number)
        finish(process)
    assert latest_checkpoint(tmp_path).name == f"iter_{iterations(tmp_path)[-1]:07d}"
    assert "stopped by a signal to another rank at iteration" in last_line(tmp_path)


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
def saving_slowly(folder: Path, pause_s: float, *flags: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A run whose writes of checkpoints take longer, and the file that appears when one begins."""
    script, marker = folder / "slow_save.py", folder / "saving"
    script.write_text(SLOW_SAVE)
    with started([str(script), str(marker), str(pause_s)], folder, *flags) as process:
        yield process, marker


@pytest.mark.parametrize(
    ("number", "save"), [(signal.SIGINT, "--no-async-save"), (signal.SIGTERM, "--async-save")], ids=["plain", "beside"]
)
def test_a_signal_during_the_last_save_costs_nothing(tmp_path: Path, number: signal.Signals, save: str) -> None:
    with saving_slowly(tmp_path, 1.0, "--train-iters", "2", save) as (process, marker):
        wait_for_file(process, marker)
        process.send_signal(number)
        finish(process)
    assert latest_checkpoint(tmp_path).name == "iter_0000002"


@BOTH
def test_a_second_signal_ends_the_run_at_once(tmp_path: Path, number: signal.Signals) -> None:
    """The first one came amid training, the second while its checkpoint is written."""
    with saving_slowly(tmp_path, 10 * DEADLINE_S) as (process, marker):
        wait_for_iteration(process, tmp_path, 2)
        process.send_signal(signal.SIGTERM)
        wait_for_file(process, marker)
        time.sleep(2 * ECHO_S)
        process.send_signal(number)
        errors = finish(process, status=128 + number)
    assert errors.splitlines()[-1] == (
        f"{number.name} after a first signal: rank 0 ends at once, and what it has not saved is lost"
    )
    assert not has_checkpoint(tmp_path)


STUCK = """
import os, sys, time
from pathlib import Path
from memo.parallel.data import ShardedDataParallel
from memo.train.entry import main

finish, calls = ShardedDataParallel.finish_reduction, 0

def wrapped(self):
    global calls
    calls += 1
    if calls == 3:
        Path(sys.argv[1], f"rank{os.environ['RANK']}").touch()
        while os.environ["RANK"] == "1":
            time.sleep(1)
    return finish(self)

ShardedDataParallel.finish_reduction = wrapped
raise SystemExit(main(sys.argv[2:]))
"""


def test_a_second_signal_ends_a_rank_that_waits_for_another(tmp_path: Path) -> None:
    """In a collective no Python runs, and so no handler either."""
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    with started([*TORCHRUN, str(script), str(tmp_path)], tmp_path) as process:
        wait_for_file(process, tmp_path / "rank0")
        wait_for_file(process, tmp_path / "rank1")
        time.sleep(0.5)  # rank 0 has come to wait
        ranks = {c.environ().get("RANK"): c for c in psutil.Process(process.pid).children(recursive=True)}
        ranks["0"].send_signal(signal.SIGINT)
        time.sleep(2 * ECHO_S)
        ranks["0"].send_signal(signal.SIGTERM)
        ranks["0"].wait(DEADLINE_S / 3)
        ranks["1"].kill()  # torchrun would ask it first, and wait
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode != 0
    assert "SIGINT: this run ends after the step" in errors
    assert "SIGTERM after a first signal: rank 0 ends at once" in errors


EARLY = """
import os, signal, sys
import memo.train.trainer as trainer
from memo.train.entry import main

build = trainer.build

def wrapped(*args):
    if os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGINT)
    return build(*args)

trainer.build = wrapped
raise SystemExit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("launcher", [[], TORCHRUN], ids=["one process", "two ranks"])
def test_a_signal_before_the_first_step_ends_the_run_there(tmp_path: Path, launcher: list[str]) -> None:
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    with started([*launcher, str(script)], tmp_path) as process:
        finish(process)
    assert iterations(tmp_path) == [] and not has_checkpoint(tmp_path)
    assert ", before its first step: nothing new to save; start again with the same command" in last_line(tmp_path)


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
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with started([*TORCHRUN, str(script)], tmp_path, "--train-iters", "1", "--offload-alpha", alpha) as process:
        finish(process)

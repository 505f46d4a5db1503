"""How real processes end: on SIGTERM after the step with a checkpoint, status 0, and with no thread left behind."""

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

from memo.checkpoint import latest_checkpoint

ROOT = Path(__file__).parents[2]
FLAGS = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --vocab-size 61 --mock-data --seq-len 64 "
    "--global-batch-size 4 --train-iters 100000 --lr 1e-3 --lr-decay-style constant --device cpu "
    "--num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000"
)
DEADLINE_S = 90.0
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
    process = subprocess.Popen(
        command, env=environment, cwd=ROOT, text=True, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
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


def finish(process: subprocess.Popen[str]) -> None:
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors[-3000:]


def test_sigterm_saves_and_a_second_run_goes_on_from_there(tmp_path: Path) -> None:
    with started(ONE_PROCESS, tmp_path) as process:
        wait_for_iteration(process, tmp_path, 3)
        process.send_signal(signal.SIGTERM)
        finish(process)
    stopped = iterations(tmp_path)[-1]
    assert latest_checkpoint(tmp_path).name == f"iter_{stopped:07d}"
    with started(ONE_PROCESS, tmp_path, "--load", str(tmp_path), "--train-iters", str(stopped + 2)) as process:
        finish(process)
    assert iterations(tmp_path) == list(range(1, stopped + 3))
    assert latest_checkpoint(tmp_path).name == f"iter_{stopped + 2:07d}"


def test_sigterm_to_one_of_two_ranks_stops_both_after_the_same_step(tmp_path: Path) -> None:
    with started([*TORCHRUN, str(ROOT / "examples" / "pretrain_gpt.py")], tmp_path, "--tp", "2") as process:
        wait_for_iteration(process, tmp_path, 2)
        workers = [c for c in psutil.Process(process.pid).children(recursive=True) if c.environ().get("RANK") == "1"]
        assert len(workers) == 1
        workers[0].send_signal(signal.SIGTERM)
        finish(process)
    assert latest_checkpoint(tmp_path).name == f"iter_{iterations(tmp_path)[-1]:07d}"


ENDS = """
import glob, sys
from memo.train.entry import main
main(sys.argv[1:])
names = [open(path).read().strip() for path in glob.glob("/proc/self/task/*/comm")]
assert not any("gloo" in name for name in names), names
"""


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads have names in /proc on Linux alone")
@pytest.mark.parametrize("alpha", ["off", "0.5"])
def test_no_thread_of_a_process_group_outlives_training(tmp_path: Path, alpha: str) -> None:
    """One that frees a tensor while the interpreter ends would abort the process, now and then."""
    script = tmp_path / "ends.py"
    script.write_text(ENDS)
    with started([*TORCHRUN, str(script)], tmp_path, "--train-iters", "1", "--offload-alpha", alpha) as process:
        finish(process)

"""`memo train` under torchrun on emulated GPUs: every axis over NCCL has the losses of one GPU, and no race."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from memo.emulated_gpu.launch import Device, environment

FLAGS = shlex.split(
    "--model llama-tiny --num-layers 4 --seq-length 128 --gbs 2 --mbs 1 --lr 1e-3 --mock-data --train-iters 2 "
    "--device cuda --offload-alpha off --num-threads 1"
)
TIMEOUT_S = 280
BFLOAT16_STEP = 2.0**-8
"""Sums over ranks round otherwise."""

LAYOUTS = {
    "tp": ["--tp", "2"],
    "cp": ["--cp", "2"],
    "pp": ["--pp", "2"],
    "dp": [],
    "dp, streamed states": ["--offload-states", "all"],
}


def losses(layout: list[str], ranks: int, tmp_path: Path, schedule: str) -> list[float]:
    env = environment(Device(schedule=schedule, check_races=True), tmp_path / "gpu.txt") | {"OMP_NUM_THREADS": "1"}
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks > 1 else []
    command = [sys.executable, "-m", *start, "memo", "train", *FLAGS, *layout]
    done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "race:" not in done.stderr, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]


@pytest.fixture(scope="module")
def on_one_gpu(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    found = losses([], 1, tmp_path_factory.mktemp("one"), "eager")
    assert len(found) == 2
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_has_the_losses_of_one_gpu(tmp_path: Path, on_one_gpu: list[float], name: str) -> None:
    assert losses(LAYOUTS[name], 2, tmp_path, "lazy") == pytest.approx(on_one_gpu, rel=BFLOAT16_STEP)

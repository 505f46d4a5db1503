"""The example under torchrun: eight ranks and one process log the same losses for 20 steps (fp64, 1e-10)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLAGS = [
    *("--model", "llama-tiny", "--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
    *("--num-query-groups", "2", "--ffn-hidden-size", "64", "--vocab-size", "64", "--mock-data"),
    *("--seq-len", "64", "--global-batch-size", "4", "--train-iters", "20", "--lr", "1e-2"),
    *("--lr-warmup-iters", "4", "--params-dtype", "fp64", "--device", "cpu", "--num-threads", "1"),
]


def losses(tmp_path: Path, name: str, launcher: list[str], layout: list[str]) -> list[float]:
    log = tmp_path / f"{name}.jsonl"
    script = str(ROOT / "examples" / "pretrain_gpt.py")
    command = [*launcher, script, *FLAGS, *layout, "--log-jsonl", str(log)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return [json.loads(line)["lm_loss"] for line in log.read_text().splitlines()]


def torchrun(ranks: int) -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return losses(tmp_path_factory.mktemp("one"), "one", [sys.executable], [])


@pytest.mark.parametrize("layout", ["--tp 2 --cp 2 --pp 2", "--tp 2 --pp 2"], ids=["tp2-cp2-pp2", "tp2-pp2-dp2"])
def test_eight_ranks_log_the_losses_of_one(tmp_path: Path, layout: str, one_process: list[float]) -> None:
    eight = losses(tmp_path, "eight", torchrun(8), layout.split())
    assert len(eight) == len(one_process) == 20
    assert max(abs(a - b) for a, b in zip(eight, one_process, strict=True)) <= 1e-10
    assert one_process[-1] < one_process[0] - 0.5  # it learns

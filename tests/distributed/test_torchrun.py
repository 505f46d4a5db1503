"""The example under torchrun: eight ranks and one process log the same losses for 20 steps.

fp64: within 1e-10. fp32: within 5e-6, ten roundings of a loss of 4; each Adam step passes the rounding of nearly zero
gradients on, magnified by the root of the second moment. Measured: 9e-16 and 2.4e-7.
"""

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
    *("--lr-warmup-iters", "4", "--device", "cpu", "--num-threads", "1"),
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


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-10), ("fp32", 5e-6)])
def test_eight_ranks_log_the_losses_of_one(tmp_path: Path, dtype: str, bound: float) -> None:
    one = losses(tmp_path, "one", [sys.executable], ["--params-dtype", dtype])
    assert one[-1] < one[0] - 0.5  # it learns
    for layout in ("--tp 2 --cp 2 --pp 2", "--tp 2 --pp 2"):  # the second leaves dp 2
        eight = losses(tmp_path, layout, torchrun(8), [*layout.split(), "--params-dtype", dtype])
        assert len(eight) == len(one) == 20
        difference = max(abs(a - b) for a, b in zip(eight, one, strict=True))
        print(f"{dtype} {layout}: largest difference of a loss {difference:.1e}")
        assert difference <= bound

"""Ranks killed at random moments: does the run that torchrun restarts end where an uninterrupted one does?

    python benchmarks/kill_campaign.py                    # 20 kills under two layouts: a quarter of an hour
    python benchmarks/kill_campaign.py --kills 100 --seed 7

One command line for all lives of a run: torchrun --max-restarts, --save and --load the same directory, two ranks,
a checkpoint after every second step, written beside training in one half of the campaign and before the next step in
the other. SIGKILL goes to a random rank at a random moment of each life: while it starts and loads, or up to a step and
a half after some of its first steps, thus often amid a save.

The bound is none: every loss and gradient norm that any life logs, and at the end every weight, moment and counter,
must have the bits of the uninterrupted run. A row a kill says when it came, and what was on disk.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
import rows
import torch

from memo.checkpoint import has_checkpoint, latest_checkpoint
from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.run_state import read_state
from memo.checkpoint.store import open_checkpoint, read_tensors
from memo.mesh import Mesh, RankGrid

ROOT = Path(__file__).parents[1]
RANKS = 2
FLAGS = (
    "--model llama-tiny --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 128 --vocab-size 256 --mock-data --seq-len 128 --global-batch-size 4 --lr 1e-3 --device cpu "
    "--num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000 --params-dtype bf16 --save-interval 2"
)
CAMPAIGNS = {
    "beside": "--async-save --keep-latest-k 2 --offload-alpha off",
    "plain": "--no-async-save --keep-latest-k 1 --tp 2 --offload-alpha 0.5",
}
STARTING_SHARE = 0.2
"""Of the kills: before a life has logged a step."""
LATEST_STEP = 3
"""Other kills come soon after one of a life's first steps, so that the run goes forward."""
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Kill:
    """One death."""

    campaign: str
    life: int
    rank: int
    moment: str
    logged_iteration: int
    newest_checkpoint: int
    amid_save: bool


def start(folder: Path, flags: str, train_iters: int, max_restarts: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    command += ["--max-restarts", str(max_restarts), "--monitor-interval", "0.1"]
    command += [str(ROOT / "examples" / "pretrain_gpt.py"), *FLAGS.split(), *flags.split()]
    command += ["--train-iters", str(train_iters), "--save", str(folder), "--load", str(folder)]
    command += ["--log-jsonl", str(folder / "log.jsonl")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with open(folder.with_suffix(".txt"), "w") as output:
        return subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT, text=True)


def records(folder: Path) -> list[tuple[int, float, float, float]]:
    """(iteration, loss, gradient norm, seconds) of every step that any life logged."""
    log = folder / "log.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["iteration"], row["lm_loss"], row["grad_norm"], row["step_time_s"]) for row in found]


def workers(run: subprocess.Popen[str], life: int) -> list[psutil.Process]:
    """The ranks of one life, as torchrun numbers them; empty until all are there."""
    found = {}
    for child in psutil.Process(run.pid).children(recursive=True):
        try:
            environment = child.environ()
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue
        if environment.get("TORCHELASTIC_RESTART_COUNT") == str(life):
            found[int(environment["RANK"])] = child
    return [found[rank] for rank in sorted(found)] if len(found) == RANKS else []


def wait_for(run: subprocess.Popen[str], condition: Any, what: str) -> Any:
    deadline_s = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        if run.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"{what} did not come; torchrun's status is {run.poll()}")
        time.sleep(0.01)
    return value


def kill_one(run: subprocess.Popen[str], folder: Path, campaign: str, life: int, dice: random.Random) -> Kill:
    """Wait for a random moment of this life and end one rank at once."""
    logged = len(records(folder))
    ranks = wait_for(run, lambda: workers(run, life), f"life {life}")
    start_s = time.monotonic()
    if dice.random() < STARTING_SHARE:
        moment = "starting"
        time.sleep(dice.uniform(0.0, 10.0))
    else:
        steps = dice.randint(1, LATEST_STEP)
        wait_for(run, lambda: len(records(folder)) >= logged + steps, f"step {steps} of life {life}")
        moment = f"after step {steps} of this life"
        time.sleep(dice.uniform(0.0, 1.5 * records(folder)[-1][-1]))
    amid_save = any(folder.glob("*.partial"))
    rank = dice.randrange(RANKS)
    newest = read_state(latest_checkpoint(folder)).iteration if has_checkpoint(folder) else 0
    ranks[rank].kill()
    logged_iteration = max([row[0] for row in records(folder)], default=0)
    print(f"{campaign}: life {life}, rank {rank} killed {moment}, {time.monotonic() - start_s:.1f} s old", flush=True)
    return Kill(campaign, life, rank, moment, logged_iteration, newest, amid_save)


def bits(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Everything that the newest checkpoint holds."""
    final = latest_checkpoint(folder)
    state, index = open_checkpoint(final)
    values = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in index.items()}
    tensors = {name: GlobalTensor.whole(value) for name, value in values.items()}
    read_tensors(final, index, tensors, Mesh(RankGrid(tp=1, cp=1, dp=1, pp=1), 0))
    return asdict(state), values


def finish(run: subprocess.Popen[str], folder: Path) -> None:
    if run.wait(timeout=DEADLINE_S) != 0:
        raise SystemExit(f"a run ended with status {run.returncode}:\n{folder.with_suffix('.txt').read_text()[-3000:]}")


def campaign(name: str, kills: int, train_iters: int, dice: random.Random, root: Path) -> list[dict[str, Any]]:
    whole, killed = root / f"{name}-whole", root / f"{name}-killed"
    finish(start(whole, CAMPAIGNS[name], train_iters, 0), whole)
    run = start(killed, CAMPAIGNS[name], train_iters, kills)
    try:
        found = [kill_one(run, killed, name, life, dice) for life in range(kills)]
        finish(run, killed)
    finally:
        run.kill()
    expected = {row[:3] for row in records(whole)}
    wrong_steps = sorted({row[0] for row in records(killed) if row[:3] not in expected})
    (state, values), (expected_state, expected_values) = bits(killed), bits(whole)
    wrong = [key for key, value in expected_values.items() if not torch.equal(value, values[key])]
    same = not wrong_steps and not wrong and state == expected_state and values.keys() == expected_values.keys()
    steps = len(records(killed))
    print(
        f"{name}: {kills} kills, {steps} steps for {train_iters}; every bit the same: {same} {wrong_steps} {wrong[:3]}"
    )
    shared = {"flags": CAMPAIGNS[name], "train_iters": train_iters, "steps_taken": steps, "same_bits": same}
    return [{**asdict(kill), **shared} for kill in found]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    dice, found = random.Random(args.seed), []
    with tempfile.TemporaryDirectory() as folder:
        for i, name in enumerate(CAMPAIGNS):
            kills = (args.kills + i) // len(CAMPAIGNS)
            found += campaign(name, kills, train_iters=LATEST_STEP * (kills + 1), dice=dice, root=Path(folder))
    path = rows.write("kill_campaign", found)
    amid = sum(row["amid_save"] for row in found)
    print(
        f"{len(found)} kills, {amid} of them amid a save, {sum(row['same_bits'] for row in found)} as if none: {path}"
    )
    if not all(row["same_bits"] for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

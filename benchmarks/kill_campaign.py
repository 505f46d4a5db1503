"""Tests runs with faults at random places: every rank must end with its cause, and the run must resume with equal bits.

    python benchmarks/kill_campaign.py                    # 40 faults: half an hour on two cores
    python benchmarks/kill_campaign.py --faults 100 --seed 7

Each fault has a run of its own, with two to four ranks that are started without a launcher. One rank kills itself,
stops, raises, or asks the run to end (benchmarks/faulty_rank.py). It does so at a random call of a random place: at the
start, in a step, an offload, a streamed state, a save (beside training or not), or the last save. Then the same command
starts the run again.

Three conditions must hold. First, every rank has ended within 30 s of the fault. If a rank was stopped (SIGSTOP), the
30 s begin after --distributed-timeout-minutes, and the stopped rank is then removed, as by a launcher. Second, every
rank that ended by itself names the cause on standard error or, if a signal asked for the end, the run says that it
stopped. Third, every bit of loss, gradient norm, weights, moments and counters equals that of a run without faults.
"""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import rows
import torch

from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.directory import latest_checkpoint
from memo.checkpoint.store import open_checkpoint, read_tensors

ROOT = Path(__file__).parents[1]
TRAIN_ITERS = 6
TIMEOUT_S = 20.0
GONE_S = 30.0
DEADLINE_S = 600.0
FLAGS = (
    "--model llama-tiny --num-layers 2 --hidden-size 64 --num-attention-heads 4 --num-query-groups 2 "
    "--ffn-hidden-size 128 --vocab-size 256 --mock-data --seq-len 128 --global-batch-size 12 --lr 1e-3 --device cpu "
    "--num-threads 1 --peak-tflops 1 --no-progress --max-step-minutes 1000 --params-dtype bf16 --save-interval 2 "
    f"--train-iters {TRAIN_ITERS} --distributed-timeout-minutes {TIMEOUT_S / 60}"
)
LAYOUTS: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "dp 2, saved beside": (2, "--async-save --keep-latest-k 2 --offload-alpha off", ()),
    "tp 2, offload": (2, "--tp 2 --keep-latest-k 1 --offload-alpha 0.5", ("offload",)),
    "dp 3, streamed states": (
        3,
        "--offload-states all --offload-alpha off --clip-grad 1 --async-save",
        ("streamed states",),
    ),
    "tp 2 x pp 2, offload": (4, "--tp 2 --pp 2 --offload-alpha 0.5 --keep-latest-k 2", ("offload",)),
}
"""By layout: number of ranks, flags, and the places that only this layout passes."""
PLACES = {"start": 1, "step": 5, "offload": 30, "streamed states": 60, "save": 60, "last save": 10}
"""Places, and the last call of each place at which a fault may come."""
FAULTS = ("SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "error", "bug")
ASKS = ("SIGTERM", "SIGINT")


@dataclass
class Outcome:
    """One fault, and how each rank ended in the process group that met it."""

    layout: str
    place: str
    call: int
    fault: str
    rank: int
    was_met: bool = False
    gone_s: float = 0.0
    statuses: list[int | None] = field(default_factory=list)
    names_cause: bool = False
    same_bits: bool = False

    @property
    def is_good(self) -> bool:
        return self.gone_s <= GONE_S and self.names_cause and self.same_bits


def start(layout: str, folder: Path, life: str, outcome: Outcome | None = None) -> list[subprocess.Popen[bytes]]:
    """Start all ranks of one life (one start of the run); the victim of `outcome` runs with its fault."""
    ranks, flags, _ = LAYOUTS[layout]
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        port = listener.getsockname()[1]
    kept = ["--save", str(folder), "--load", str(folder), "--log-jsonl", str(folder / "log.jsonl")]
    arguments = [*FLAGS.split(), *flags.split(), *kept]
    started = []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
        environment |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        command = [sys.executable, "-m", "memo", "train"]
        if outcome is not None and outcome.rank == rank:
            command = [sys.executable, str(ROOT / "benchmarks" / "faulty_rank.py"), outcome.place, str(outcome.call)]
            command += [outcome.fault, str(mark_of(folder))]
        with open(told(folder, life, rank), "wb") as output:
            started.append(
                subprocess.Popen([*command, *arguments], env=environment, stdout=output, stderr=subprocess.STDOUT)
            )
    return started


def told(folder: Path, life: str, rank: int) -> Path:
    """Return the file with the output of a rank, beside the run's own directory."""
    return folder.with_name(f"{folder.name}.{life}.{rank}.txt")


def mark_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.met")


def wait_for_end(processes: list[subprocess.Popen[bytes]], but: int | None = None) -> None:
    """Wait for all processes but one; kill those that still run at the deadline."""
    deadline_s = time.monotonic() + DEADLINE_S
    for rank, process in enumerate(processes):
        if rank != but:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def meet_fault(outcome: Outcome, folder: Path) -> None:
    """Run the life with the fault, and fill `outcome` with how it ended."""
    processes = start(outcome.layout, folder, "fault", outcome)
    try:
        wait_for_end(processes, but=outcome.rank if outcome.fault == "SIGSTOP" else None)
        ended_s = time.time()
    finally:
        for process in processes:
            process.kill()  # works on a stopped process, too
            process.wait()
    outcome.statuses = [process.returncode for process in processes]
    outcome.was_met = mark_of(folder).exists()
    if not outcome.was_met:
        outcome.names_cause = all(status == 0 for status in outcome.statuses)
        return
    outcome.gone_s = ended_s - mark_of(folder).stat().st_mtime - (TIMEOUT_S if outcome.fault == "SIGSTOP" else 0.0)
    texts = [told(folder, "fault", rank).read_text(errors="replace") for rank in range(len(processes))]
    outcome.names_cause = names_cause(outcome, texts)


def names_cause(outcome: Outcome, texts: list[str]) -> bool:
    """Return whether every rank that could write names the cause, and ends with the right status."""
    victim = f"rank {outcome.rank} ("
    others = [rank for rank in range(len(texts)) if rank != outcome.rank]
    if outcome.fault in ASKS:
        # A run that was already at its last checkpoint needs no word of being stopped.
        is_over = any(f"stopped by {who}" in texts[0] for who in (outcome.fault, "a signal to another rank"))
        is_over = is_over or f"iter_{TRAIN_ITERS:07d}" in texts[0]
        return is_over and set(outcome.statuses) == {0} and outcome.fault in texts[outcome.rank]
    if outcome.place in ("save", "last save") and outcome.fault in ("error", "bug"):
        # If one rank cannot write, all ranks learn of it in the save: each ends with this error.
        return all("could not be written" in text or "left first" in text for text in texts) and all(outcome.statuses)
    own = {"error": f"{victim}", "bug": "KeyError: 'a fault on purpose'"}.get(outcome.fault, "")
    others_know = all(f"error: {victim}" in texts[rank] and "left first: " in texts[rank] for rank in others)
    return others_know and own in texts[outcome.rank] and all(outcome.statuses[rank] == 3 for rank in others)


def records(folder: Path) -> set[tuple[int, float, float]]:
    """Return (iteration, loss, gradient norm) of every step that any life logged."""
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    found = [json.loads(line) for line in lines if line.endswith("\n")]
    return {(row["iteration"], row["lm_loss"], row["grad_norm"]) for row in found if "lm_loss" in row}


def bits(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the contents of the newest checkpoint."""
    final = latest_checkpoint(folder)
    state, index = open_checkpoint(final)
    values = {name: torch.empty(entry.shape, dtype=entry.torch_dtype) for name, entry in index.items()}
    tensors = {name: GlobalTensor.whole(value) for name, value in values.items()}
    read_tensors(final, index, tensors)
    return asdict(state), values


def finish(layout: str, folder: Path, life: str) -> None:
    processes = start(layout, folder, life)
    wait_for_end(processes)
    for rank, process in enumerate(processes):
        if process.returncode != 0:
            text = told(folder, life, rank).read_text(errors="replace")[-3000:]
            raise SystemExit(f"{layout}: rank {rank} of {folder.name} ended with {process.returncode}:\n{text}")


def is_same(folder: Path, whole: Path) -> bool:
    (state, values), (expected_state, expected) = bits(folder), bits(whole)
    same_values = values.keys() == expected.keys() and all(torch.equal(expected[name], values[name]) for name in values)
    return state == expected_state and same_values and records(folder) == records(whole)


def draw(faults: int, dice: random.Random) -> list[Outcome]:
    """Draw `faults` faults, with every kind and layout equally often."""
    found = []
    for number in range(faults):
        layout = list(LAYOUTS)[number % len(LAYOUTS)]
        ranks, _, own = LAYOUTS[layout]
        place = dice.choice([*own, *own, "start", "step", "save", "last save"])
        fault = FAULTS[(number + number // len(FAULTS)) % len(FAULTS)]
        found.append(Outcome(layout, place, dice.randint(1, PLACES[place]), fault, dice.randrange(ranks)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="directory for what the runs leave; default: a temporary one")
    args = parser.parse_args()
    outcomes, journal = draw(args.faults, random.Random(args.seed)), rows.Journal("kill_campaign")
    with tempfile.TemporaryDirectory() as temporary:
        root = args.keep or Path(temporary)
        root.mkdir(parents=True, exist_ok=True)
        wholes: dict[str, Path] = {}
        for number, outcome in enumerate(outcomes):
            if outcome.layout not in wholes:
                wholes[outcome.layout] = root / f"whole{len(wholes)}"
                finish(outcome.layout, wholes[outcome.layout], "whole")
            folder = root / f"run{number}"
            meet_fault(outcome, folder)
            finish(outcome.layout, folder, "again")
            outcome.same_bits = is_same(folder, wholes[outcome.layout])
            journal.add({**asdict(outcome), "timeout_s": TIMEOUT_S, "is_good": outcome.is_good})
    met = [outcome for outcome in outcomes if outcome.was_met]
    slowest_s = max((outcome.gone_s for outcome in met), default=0.0)
    print(
        f"{len(outcomes)} runs, {len(met)} faults met; {sum(outcome.is_good for outcome in outcomes)} good; "
        f"the last rank had gone after at most {slowest_s:.1f} s"
    )
    if not all(outcome.is_good for outcome in outcomes):
        raise SystemExit(1)


if __name__ == "__main__":
    main()

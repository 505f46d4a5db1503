"""Runs each flow of training on emulated GPUs under many random schedules: status 1 after one wrong bit or one race.

    python -m memo.emulated_gpu --poison -- python tests/support/emulated_campaign.py --seeds 20 --processes 2 --keep

`make emulated` runs the same flows under two seeds each (tests/emulated_gpu/test_training.py), and the layouts of
several GPUs under one or two schedules (test_emulated_layouts.py); here all layouts for a number of GPUs are one flow.
Each flow prints a line when it ends, so that a stopped campaign has its results so far; with --keep it goes on there.
"""

import argparse
import functools
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rows
from emulated_flows import FLOWS, LAYOUTS

from memo.emulated_gpu.face import EmulatedGpu
from memo.emulated_gpu.launch import Device, environment, is_emulated

RESULTS = "emulated_schedules"
RANKS = {f"layouts of {ranks} GPUs": ranks for ranks in LAYOUTS}
PROGRAM = Path(__file__).parents[1] / "emulated_gpu" / "ranks_of_training.py"


def faults_of(name: str, seeds: int) -> list[str]:
    """Return the differences from the eager run, and the races."""
    gpu, flow = EmulatedGpu(), FLOWS[name]
    gpu.check_races()
    gpu.clear()
    gpu.set_schedule("eager")
    expected, found = flow.run("cuda"), []
    for policy, seed in [("lazy", 0), *(("random", seed) for seed in range(seeds))]:
        gpu.set_schedule(policy, seed)
        if flow.run("cuda") != expected:
            found.append(f"{policy} {seed}: other numbers than eager")
    return found + [f"race: {race}" for race in gpu.races()]


def faults_of_layouts(ranks: int, seeds: int) -> list[str]:
    """Return the differences of every layout for `ranks` ranks; a race ends the program, which names it."""
    schedules = ["eager:0", "lazy:0", *(f"random:{seed}" for seed in range(seeds))]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        device = environment(Device(check_races=True, poison=True), Path(folder) / "gpu.txt")
        done = subprocess.run(
            [*launcher, PROGRAM, file, *schedules], check=False, capture_output=True, text=True, env=device
        )
        if done.returncode:
            return [f"ended with status {done.returncode}: {done.stderr[-6000:]}"]
        found = json.loads(file.read_text())
    return [
        f"{name}, {schedule}: other numbers than eager"
        for name, numbers in found.items()
        for schedule in schedules
        if numbers[schedule] != numbers["eager:0"]
    ]


def cpu_s() -> float:
    """Return the CPU seconds of this process and of those that it has waited for."""
    uses = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(use.ru_utime + use.ru_stime for use in uses)


def row_of(name: str, seeds: int) -> dict[str, Any]:
    begin_s = cpu_s()
    faults = faults_of_layouts(RANKS[name], seeds) if name in RANKS else faults_of(name, seeds)
    return {
        "evidence": "on the emulated GPU",
        "flow": name,
        "random_schedules": seeds,
        "schedules": seeds + 2,
        "faults": faults,
        "cpu_s": round(cpu_s() - begin_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="random schedules of each flow; default: 20")
    parser.add_argument("--flow", action="append", choices=[*FLOWS, *RANKS], help="only this one; may be given again")
    parser.add_argument("--processes", type=int, default=1, help="flows at a time; default: 1")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"rows go to benchmarks/results/{RESULTS}.jsonl; a flow with one of this commit is not run again",
    )
    options = parser.parse_args()
    if not is_emulated():
        parser.error("this is no emulated GPU: start with python -m memo.emulated_gpu --poison -- python ...")
    os.environ["OMP_NUM_THREADS"] = "1"  # with more threads, the rounding of a product depends on the schedule
    commit, journal = rows.environment()["commit"], rows.Journal(RESULTS)
    kept = {
        row["flow"]
        for row in (rows.read(RESULTS) if options.keep else [])
        if row["commit"] == commit and row["random_schedules"] >= options.seeds
    }
    left = [name for name in options.flow or [*FLOWS, *RANKS] if name not in kept]
    num_faults = 0
    with multiprocessing.get_context("spawn").Pool(options.processes) as pool:
        for row in pool.imap_unordered(functools.partial(row_of, seeds=options.seeds), left):
            num_faults += len(row["faults"])
            told = "; ".join(row["faults"]) or "same bits, no race"
            print(f"{row['flow']}: {row['schedules']} schedules, {row['cpu_s']:.0f} CPU s: {told}", flush=True)
            if options.keep:
                journal.replace(row, "flow")
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())

"""Each flow of training on the emulated GPU under many random schedules: one bit or one race ends it with status 1.

    python -m memo.emulated_gpu --poison -- python tests/support/emulated_campaign.py --seeds 20 --processes 2 --keep

`make emulated` runs the same flows under two seeds each (tests/emulated_gpu/test_training.py). One line a flow, so that
a campaign that is stopped has told what it had seen; with --keep it goes on from there.
"""

import argparse
import functools
import multiprocessing
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rows
from emulated_flows import FLOWS

from memo.emulated_gpu.face import EmulatedGpu
from memo.emulated_gpu.launch import is_emulated

RESULTS = "emulated_schedules"


def faults_of(name: str, seeds: int) -> list[str]:
    """What differs from the eager run, and what raced."""
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


def row_of(name: str, seeds: int) -> dict[str, Any]:
    begin_s = time.process_time()
    faults = faults_of(name, seeds)
    return {
        "evidence": "on the emulated GPU",
        "flow": name,
        "random_schedules": seeds,
        "schedules": seeds + 2,
        "faults": faults,
        "cpu_s": round(time.process_time() - begin_s, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="random schedules of each flow; default: 20")
    parser.add_argument("--flow", action="append", choices=list(FLOWS), help="only this one; may be given again")
    parser.add_argument("--processes", type=int, default=1, help="flows at a time; default: 1")
    parser.add_argument(
        "--keep",
        action="store_true",
        help=f"rows go to benchmarks/results/{RESULTS}.jsonl; a flow with one of this commit is not run again",
    )
    options = parser.parse_args()
    if not is_emulated():
        parser.error("this is no emulated GPU: start with python -m memo.emulated_gpu --poison -- python ...")
    os.environ["OMP_NUM_THREADS"] = "1"  # with more, how a product rounds depends on the schedule
    commit, journal = rows.environment()["commit"], rows.Journal(RESULTS)
    kept = {
        row["flow"]
        for row in (rows.read(RESULTS) if options.keep else [])
        if row["commit"] == commit and row["random_schedules"] >= options.seeds
    }
    left = [name for name in options.flow or FLOWS if name not in kept]
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

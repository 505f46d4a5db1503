"""Each flow of training on the emulated GPU under many random schedules: one bit or one race ends it with status 1.

    python -m memo.emulated_gpu --poison -- python tests/support/emulated_campaign.py --seeds 20

`make emulated` runs the same flows under two seeds each (tests/emulated_gpu/test_training.py). One line a flow, so that
a campaign that is stopped has told what it had seen.
"""

import argparse
import sys
import time

from emulated_flows import FLOWS

from memo.emulated_gpu.face import EmulatedGpu
from memo.emulated_gpu.launch import is_emulated


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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="random schedules of each flow; default: 20")
    parser.add_argument("--flow", action="append", choices=list(FLOWS), help="only this one; may be given again")
    options = parser.parse_args()
    if not is_emulated():
        parser.error("this is no emulated GPU: start with python -m memo.emulated_gpu --poison -- python ...")
    num_faults = 0
    for name in options.flow or FLOWS:
        begin_s = time.process_time()
        faults = faults_of(name, options.seeds)
        num_faults += len(faults)
        told = "; ".join(faults) or "same bits, no race"
        print(f"{name}: {options.seeds + 2} schedules, {time.process_time() - begin_s:.0f} CPU s: {told}", flush=True)
    return min(num_faults, 1)


if __name__ == "__main__":
    sys.exit(main())

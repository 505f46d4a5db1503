"""What one rank does in test_emulated_layouts.py: torchrun ... ranks_of_training.py FILE SCHEDULE:SEED...

Trains in each layout for so many ranks under each schedule, one after the other in the same processes: to start them
takes longer. The first rank writes the numbers of each layout under each schedule.
"""

import json
import os
import sys
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "support"))
from emulated_flows import LAYOUT, LAYOUTS, steps_of

import memo
from memo.emulated_gpu.face import EmulatedGpu


def main(file: str, *schedules: str) -> None:
    gpu, found = EmulatedGpu(), {}
    for schedule in schedules:
        policy, seed = schedule.split(":")
        for name, options in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
            gpu.set_schedule(policy, int(seed))
            with memo.Trainer("llama-tiny", **{**LAYOUT, **options}) as trainer:
                found.setdefault(name, {})[schedule] = steps_of(trainer, 2)
            assert not gpu.races(), f"{name} under {schedule}: {gpu.races()}"
            print(f"{name} under {schedule}: {time.process_time():.1f} s of CPU time so far", flush=True)
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

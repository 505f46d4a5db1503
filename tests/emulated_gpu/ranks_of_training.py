"""What one rank does in test_emulated_layouts.py: ranks_of_training.py FILE SCHEDULE:SEED...

Trains in each layout for so many ranks under each schedule, one after the other in the same processes: to start them
takes longer. The first rank writes the numbers of each layout under each schedule. Under planned memory each rank looks
whether every request had the address that was planned for it.
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

STEPS = 2


def check_plan(trainer: memo.Trainer) -> None:
    transients = trainer.parts.transients
    if transients is None:
        return
    assert transients.planned is not None, transients.reason
    planned = sum(len(phase.requests) for phase in transients.planned.plan.phases)
    found = transients.statistics()
    assert found is not None
    assert found.requests == found.hits + found.native == STEPS * planned > 0, transients.report()
    assert (found.num_fallbacks, found.unasked, found.live_blocks) == (0, 0, 0), transients.report()


def main(file: str, *schedules: str) -> None:
    gpu, found = EmulatedGpu(), {}
    for schedule in schedules:
        policy, seed = schedule.split(":")
        for name, options in LAYOUTS[int(os.environ["WORLD_SIZE"])].items():
            gpu.set_schedule(policy, int(seed))
            with memo.Trainer("llama-tiny", **{**LAYOUT, **options}) as trainer:
                found.setdefault(name, {})[schedule] = steps_of(trainer, STEPS)
                check_plan(trainer)
            assert not gpu.races(), f"{name} under {schedule}: {gpu.races()}"
            print(f"{name} under {schedule}: {time.process_time():.1f} s of CPU time so far", flush=True)
    if os.environ["RANK"] == "0":
        Path(file).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

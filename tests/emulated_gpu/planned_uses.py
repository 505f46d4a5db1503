"""A planned block that a side stream uses and whose address is given on: prints how often a stream waits for that, and
the races that were told.

    python planned_uses.py [SOURCES]

SOURCES: csrc/ or a copy of it, which the planned allocator is built from. In a process of its own, because the
allocator stays in torch until the process ends.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from first_fit import first_fit

from memo.allocator import build
from memo.allocator.library import Mode
from memo.allocator.planned import ALIGNMENT_BYTES, PlannedAllocator
from memo.emulated_gpu.face import EmulatedGpu

NUM = 1 << 20


class Case(NamedTuple):
    uses: int
    """Calls of record_stream."""
    settled: int
    """Calls of settle, each after a wait."""
    elsewhere: bool = False
    """Another stream than the arena's waits and settles."""


CASES = {
    "one use": Case(1, 0),
    "one use, settled": Case(1, 1),
    "two uses, one settled": Case(2, 1),
    "two uses, both settled": Case(2, 2),
    "one use, settled by another stream": Case(1, 1, elsewhere=True),
    "no use, settled": Case(0, 1),
}


def num_waits(allocator: PlannedAllocator, side: torch.cuda.Stream, case: Case) -> int:
    """Waits of streams when the second block gets the address of the first."""
    gpu, other = EmulatedGpu(), torch.cuda.Stream()
    with allocator.iteration():
        allocator.mark("step")
        first = torch.full((NUM,), 1.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            first.add_(1.0)
        for _ in range(case.uses):
            first.record_stream(side)
        for _ in range(case.settled):
            with torch.cuda.stream(other if case.elsewhere else torch.cuda.current_stream()):
                torch.cuda.current_stream().wait_stream(side)
                allocator.settle(first)
        address = first.data_ptr()
        before = gpu.num_waits()
        del first
        second = torch.full((NUM,), 2.0, device="cuda")
        found = gpu.num_waits() - before
        assert second.data_ptr() == address or allocator._mode is not Mode.PLANNED, (
            "the plan does not use the address again"
        )
        del second  # what outlives the iteration is not planned
    return found


def main(sources: list[str]) -> None:
    if sources:
        build.source_root = lambda: Path(sources[0])  # type: ignore[assignment]
    gpu, side = EmulatedGpu(), torch.cuda.Stream()
    gpu.set_schedule("lazy")
    gpu.check_races()
    allocator = PlannedAllocator.install("cuda")
    with allocator.record() as recording:
        num_waits(allocator, side, Case(0, 0))
    plan = first_fit(recording.trace, min_bytes=4096)  # of 4 MiB blocks alone, so that offsets suit CUDA's alignment
    allocator.use(replace(plan, alignment_bytes=ALIGNMENT_BYTES["cuda"]))
    torch.cuda.synchronize()
    gpu.clear()
    found = {name: num_waits(allocator, side, case) for name, case in CASES.items()}
    torch.cuda.synchronize()
    assert allocator.statistics.num_fallbacks == 0
    print(json.dumps({"waits": found, "races": sorted(gpu.races())}))


if __name__ == "__main__":
    main(sys.argv[1:])

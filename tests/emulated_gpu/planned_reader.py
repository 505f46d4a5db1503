"""A planned block that a side stream still reads when its address is given on: prints the races that were told.

    python planned_reader.py [SOURCES]

SOURCES: csrc/ or a copy of it, which the planned allocator is built from. In a process of its own, because the
allocator stays in torch until the process ends.
"""

import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from first_fit import first_fit

from memo.allocator import build
from memo.allocator.planned import ALIGNMENT_BYTES, PlannedAllocator
from memo.emulated_gpu.face import EmulatedGpu

NUM = 1 << 20


def iteration(allocator: PlannedAllocator, side: torch.cuda.Stream) -> tuple[int, int, torch.Tensor]:
    """Addresses of two blocks, of which the second is asked for when the first was freed, and the mean of the first."""
    with allocator.iteration():
        allocator.mark("step")
        first = torch.full((NUM,), 1.0, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mean = first.mean()
        first.record_stream(side)
        address = first.data_ptr()
        del first
        second = torch.full((NUM,), 2.0, device="cuda")
        addresses = address, second.data_ptr()
        del second  # what outlives the iteration is not planned
    return *addresses, mean


def main(sources: list[str]) -> None:
    if sources:
        build.source_root = lambda: Path(sources[0])  # type: ignore[assignment]
    gpu, side = EmulatedGpu(), torch.cuda.Stream()
    gpu.set_schedule("lazy")
    gpu.check_races()
    allocator = PlannedAllocator.install("cuda")
    with allocator.record() as recording:
        iteration(allocator, side)
    plan = first_fit(recording.trace, min_bytes=4096)  # of 4 MiB blocks alone, so that offsets suit CUDA's alignment
    allocator.use(replace(plan, alignment_bytes=ALIGNMENT_BYTES["cuda"]))
    torch.cuda.synchronize()
    gpu.clear()
    first, second, mean = iteration(allocator, side)
    torch.cuda.synchronize()
    assert first == second, "the plan does not use the address again"
    assert allocator.statistics.num_fallbacks == 0
    print("\n".join(gpu.races()) or f"no race, mean {mean.item()}")


if __name__ == "__main__":
    main(sys.argv[1:])

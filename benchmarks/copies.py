"""Times copies of whole records between device and host memory: alone, in both directions at once, and under compute.

    python benchmarks/copies.py

A record has the activations that one layer moves (memo.executor.slots) at the lengths and alphas that `overlap` trains,
so sizes are those of a run. It lies in the host memory of a run: in the arena of memo.executor.host_pool, pinned on
CUDA. Under compute, matrix products fill the compute stream for longer than the copies take; the row also has their
slowdown. On a CPU one thread does all work in turn, so nothing slows a copy, and compute waits for every copy.
"""

import dataclasses
import json
import statistics
import sys
from dataclasses import dataclass
from typing import Any

import torch
from measure import Case, case_of, in_fresh_process
from rows import Journal
from scales import Arguments, parser, resolve

from memo.config import RunConfig
from memo.config.derived import resolved_offload_tiles
from memo.config.simulated_world import with_simulated_axes
from memo.errors import HostMemoryError
from memo.estimate.host_memory import available_host_bytes
from memo.executor.host_budget import Claim, budget_of
from memo.executor.host_pool import HostPool
from memo.executor.select import make_backend
from memo.executor.streams import Stream
from memo.planner.alpha import whole_tiles
from memo.spec.skeleton import moves_in_part, skeletal_tensors
from memo.spec.slots import slot_layout
from memo.train.oom import is_out_of_memory

REPETITIONS = 5
_LONGER = 1.5
"""Seconds of compute over those of the slower copy, so that both copies overlap with compute from start to end."""
Directions = tuple[Stream, ...]
BOTH: Directions = (Stream.OFFLOAD, Stream.PREFETCH)


@dataclass(frozen=True)
class Times:
    """Seconds of each stream's work, medians of REPETITIONS."""

    offload_s: float
    prefetch_s: float
    compute_s: float


class Bench:
    """One record for each direction, and matrices to multiply meanwhile.

    Raises HostMemoryError, or torch's error, if memory does not hold the records.
    """

    def __init__(self, record_bytes: int, device: torch.device) -> None:
        self.backend = make_backend("auto", device)
        alone = Claim(available_host_bytes())
        self.pool = HostPool(2, record_bytes, device, budget_of(alone, [alone]))
        self.out, self.back = (torch.zeros(record_bytes, dtype=torch.uint8, device=device) for _ in range(2))
        size, dtype = (8192, torch.bfloat16) if device.type == "cuda" else (256, torch.float32)
        self.matrix, self.product = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))

    def times(self, directions: Directions, products: int) -> Times:
        taken = [self._once(directions, products) for _ in range(REPETITIONS)]
        return Times(*(statistics.median(one[at] for one in taken) for at in range(3)))

    def _once(self, directions: Directions, products: int) -> list[float]:
        streams = (*BOTH, Stream.COMPUTE)
        self.backend.synchronize()
        begun, ended = [self.backend.timestamp(stream) for stream in streams], []
        for stream, dst, src in (
            (Stream.OFFLOAD, self.pool.record(0), self.out),
            (Stream.PREFETCH, self.back, self.pool.record(1)),
        ):
            if stream in directions:
                self.backend.copy(stream, dst, src, "to", "from")
            ended.append(self.backend.timestamp(stream))
        for _ in range(products):
            torch.mm(self.matrix, self.matrix, out=self.product)
        ended.append(self.backend.timestamp(Stream.COMPUTE))
        self.backend.synchronize()
        return [end.seconds_since(begin) for begin, end in zip(begun, ended, strict=True)]


def rates(record_bytes: int, device: torch.device) -> dict[str, Any]:
    """Return GB/s (10^9 bytes) of each direction alone and beside other work, and the slowdown of compute."""
    try:
        bench = Bench(record_bytes, device)
        bench.times(BOTH, 1)  # the first touch of everything
        alone = {name: bench.times(directions, 0) for name, directions in _COMPANIES.items()}
        product_s = bench.times((), 10).compute_s / 10
        slower_s = max(alone["both"].offload_s, alone["both"].prefetch_s)
        products = max(10, int(_LONGER * slower_s / product_s))
        busy_s = bench.times((), products).compute_s
        beside = {name: bench.times(directions, products) for name, directions in _COMPANIES.items()}
    except HostMemoryError as error:
        return {"status": "oom", "message": str(error)}
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        return {"status": "oom", "message": str(error).splitlines()[0]}
    found: dict[str, Any] = {"status": "ok", "products": products}
    for company, times in (("alone", alone), ("compute", beside)):
        found |= _rates(record_bytes, company, times)
    slowed = {f"compute_slowed_by_{name}": taken.compute_s / busy_s for name, taken in beside.items()}
    return {**found, **slowed}


_COMPANIES: dict[str, Directions] = {"offload": (Stream.OFFLOAD,), "prefetch": (Stream.PREFETCH,), "both": BOTH}


def _rates(record_bytes: int, company: str, times: dict[str, Times]) -> dict[str, float]:
    def gb_per_s(seconds: float) -> float:
        return record_bytes / seconds / 1e9

    return {
        f"offload_{company}_gb_per_s": gb_per_s(times["offload"].offload_s),
        f"prefetch_{company}_gb_per_s": gb_per_s(times["prefetch"].prefetch_s),
        f"offload_{company}_both_gb_per_s": gb_per_s(times["both"].offload_s),
        f"prefetch_{company}_both_gb_per_s": gb_per_s(times["both"].prefetch_s),
    }


def record_bytes_of(case: Case, alpha: float) -> int:
    """Return the bytes that one layer of the case moves with this alpha (--offload-policy paper)."""
    config = dataclasses.replace(RunConfig(), model=case.model).override(
        {"seq_length": case.seq_length, "simulate_world": case.world, "params_dtype": _DTYPES[case.device]}
    )
    config = with_simulated_axes(config.override({"offload_policy": "paper"}))
    groups = {t.group for t in skeletal_tensors(config.model) if moves_in_part(t, "paper")}
    tiles = whole_tiles(alpha, resolved_offload_tiles(config))
    return slot_layout(config, dict.fromkeys(groups, tiles)).moved_bytes


_DTYPES = {"cpu": "fp32", "cuda": "bf16"}


def sizes(args: Arguments) -> dict[int, tuple[int, float]]:
    """Return {bytes of a record: (tokens of the sequence, alpha)}, each size once, the smallest first."""
    found: dict[int, tuple[int, float]] = {}
    for seq_length in args.scale.lengths:
        case = case_of(args, "memo", args.scale.rank, seq_length, world=args.scale.world)
        for alpha in args.scale.alphas:
            found.setdefault(record_bytes_of(case, alpha), (seq_length, alpha))
    return dict(sorted(found.items()))


def main() -> None:
    flags = parser(__doc__)
    flags.add_argument("--one", nargs=2, metavar=("BYTES", "DEVICE"), help="measure records of one size; print the row")
    given = flags.parse_args()
    if given.one:
        print(json.dumps(rates(int(given.one[0]), torch.device(given.one[1]))))
        return
    args = resolve(given)
    journal = Journal(f"{args.scale.name}/copies")
    for record_bytes, (seq_length, alpha) in sizes(args).items():
        command = [sys.executable, __file__, "--one", str(record_bytes), args.scale.device]
        row = in_fresh_process(command, min(args.scale.timeout_s, args.left_s))
        about = {"scale": args.scale.name, "seq_length": seq_length, "alpha": alpha, "record_bytes": record_bytes}
        journal.add({**about, "simulated_world": args.scale.world, **row})


if __name__ == "__main__":
    main()

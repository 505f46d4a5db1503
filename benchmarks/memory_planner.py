"""Peaks and times of the memory planner on minimalloc's challenge and on whole iterations.

    python benchmarks/memory_planner.py --minimalloc DIR     (github.com/google/minimalloc, benchmarks/challenging)

The iterations are synthetic: forwards and backwards of GPT layers under 1F1B. They keep all activations or, as under
swapping, only the inputs of layers.
"""

import argparse
import itertools
import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rows

from memo.artifacts.memory_trace import Event, Free, Malloc, Phase, Trace
from memo.planner.memory.minimalloc import read_csv
from memo.planner.memory.solve import solve
from memo.planner.memory.trace_plan import Planner, solve_trace
from memo.units import MIB

UNIT_BYTES = 64 * MIB
"""One activation of 8,192 tokens at hidden size 4,096, two bytes each."""
KEPT = {"norm1": 1, "qkv": 3, "attention": 1, "residual": 1, "norm2": 1, "fc1": 4, "gelu": 4}
IN_FLIGHT = 4
"""Microbatches between forward and backward: the first of four pipeline stages."""


def challenge(folder: Path, time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield one row for each NAME.CAPACITY.csv, and one for all files."""
    peaks = []
    for path in sorted(folder.glob("*.csv")):
        match = re.fullmatch(r"(\w)\.(\d+)\.csv", path.name)
        if match is None:
            continue
        capacity_bytes = int(match[2])
        start_s = time.monotonic()
        problem = read_csv(path, capacity_bytes)
        found = solve(problem, time_limit_s)
        peaks.append(found.peak_bytes / capacity_bytes)
        yield {
            "instance": match[1],
            "num_blocks": len(problem.blocks),
            "peak_over_capacity": peaks[-1],
            "bound_over_capacity": found.lower_bound_bytes / capacity_bytes,
            "proof": found.proof,
            "solver": found.solver,
            "planning_s": time.monotonic() - start_s,
        }
    if peaks:
        fitting = sum(peak <= 1 for peak in peaks)
        mean = sum(peaks) / len(peaks)
        yield {"instance": "all", "mean_peak_over_capacity": mean, "fit": fitting, "of": len(peaks)}


def iteration(num_layers: int, num_microbatches: int, keeps_all: bool) -> Trace:
    """Return a synthetic trace with about 40 requests for each layer and microbatch."""
    return Trace("cpu", "composed", tuple(_Iteration(num_layers, keeps_all).phases(num_microbatches)))


class _Iteration:
    def __init__(self, num_layers: int, keeps_all: bool) -> None:
        self.num_layers, self.keeps_all = num_layers, keeps_all
        self.ids = itertools.count()
        self.kept: dict[tuple[int, int], list[int]] = {}
        self.events: list[Event] = []

    def phases(self, num_microbatches: int) -> Iterator[Phase]:
        for step in range(num_microbatches + IN_FLIGHT - 1):
            if step < num_microbatches:
                for layer in range(self.num_layers):
                    yield self._phase("layer_forward", layer, step)
            if (done := step - IN_FLIGHT + 1) >= 0:
                for layer in reversed(range(self.num_layers)):
                    yield self._phase("layer_backward", layer, done)

    def _phase(self, kind: str, layer: int, microbatch: int) -> Phase:
        self.events = []
        if kind == "layer_forward":
            self._forward(layer, microbatch)
        else:
            self._backward(layer, microbatch)
        return Phase(kind, layer, microbatch, tuple(self.events))

    def _make(self, units: float) -> int:
        block = next(self.ids)
        self.events.append(Malloc(block, int(units * UNIT_BYTES)))
        return block

    def _free(self, *blocks: int) -> None:
        self.events.extend(Free(block) for block in blocks)

    def _forward(self, layer: int, microbatch: int) -> None:
        kept = [self._make(1)]  # the layer's input
        for units in KEPT.values():
            work = self._make(units * 9 / 8), self._make(0.3)
            block = self._make(units)
            self._free(*work)
            if self.keeps_all:
                kept.append(block)
            else:
                self._free(block)
        self.kept[layer, microbatch] = kept

    def _backward(self, layer: int, microbatch: int) -> None:
        """Recompute first; then make each gradient while the gradient that it follows from still lives."""
        rebuilt = [] if self.keeps_all else [self._make(units) for units in KEPT.values()]
        gradient = self._make(1)
        for units in reversed(KEPT.values()):
            work = self._make(units / 2), self._make(0.7)
            following = self._make(units)
            self._free(gradient, *work)
            gradient = following
            if rebuilt:
                self._free(rebuilt.pop())
        self._free(gradient, *self.kept.pop((layer, microbatch)))


def whole_iterations(sizes: list[str], time_limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield one row for each LAYERSxMICROBATCHES, kind of iteration and planner."""
    planners: tuple[Planner, ...] = ("paper", "flat", "auto")
    for size, keeps_all, planner in itertools.product(sizes, (True, False), planners):
        trace = iteration(*map(int, size.split("x")), keeps_all=keeps_all)
        start_s = time.monotonic()
        plan = solve_trace(trace, planner, time_limit_s=time_limit_s).plan
        yield {
            "layers_x_microbatches": size,
            "activations": "kept" if keeps_all else "swapped",
            "planner": planner,
            "chosen": plan.planner,
            "num_requests": sum(len(phase.requests) for phase in plan.phases),
            "peak_over_bound": plan.arena_bytes / plan.lower_bound_bytes,
            "proof": plan.proof,
            "planning_s": time.monotonic() - start_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minimalloc", type=Path, help="folder of NAME.CAPACITY.csv files")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each challenge instance")
    parser.add_argument("--iterations", nargs="*", default=["8x4", "32x8", "80x8"], metavar="LAYERSxMICROBATCHES")
    args = parser.parse_args()
    found = [whole_iterations(args.iterations, time_limit_s=10.0)]
    if args.minimalloc:
        found.append(challenge(args.minimalloc, args.time_limit))
    results = []
    for row in itertools.chain(*found):
        print(json.dumps(row), flush=True)
        results.append(row)
    print(f"kept in {rows.write('memory_planner', results)}")


if __name__ == "__main__":
    main()

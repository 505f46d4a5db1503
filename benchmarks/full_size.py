"""Memory of one rank of eight at full size: what memo foresees, beside what its program takes on the emulated GPU.

    python -m memo.emulated_gpu -- python benchmarks/full_size.py [--only NAME ...] [--allocators NAME ...]

Needs a CUDA build of torch and no GPU (`make emulated` installs one: .venv-emulated/bin/python). Every row is one run
of three steps of `memo train --simulate-world tp=8` without numbers (csrc/emulated_gpu/README.md): real Python, host
code of operators and allocators. Peaks are those of the steps after the first. Under alpha auto the layer's times and
the links' rates, which only a GPU can measure, are those of memo's model of an H100. A row takes the place of an
earlier one of the same run.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rows

from memo.config import RunConfig, preset
from memo.config.simulated import with_simulated_axes
from memo.emulated_gpu.launch import Device, environment
from memo.estimate.own_memory import own_memory
from memo.estimate.rank_memory import RankMemory
from memo.units import GIB

GPUS = 8
STEPS = 2
"""That count, after the first."""
TIMEOUT_S = 3600
EVIDENCE = "on the emulated GPU"
ROOMY = Device(memory_gib=180, host_memory_gib=2000, without_numbers=True)
"""Holds whatever a rank needs, so that it can be seen."""
H100 = dataclasses.replace(ROOMY, memory_gib=80)
"""Where alpha auto decides by what the device has."""

BASE: dict[str, object] = {
    "mock_data": True,
    "global_batch_size": 1,
    "train_iters": STEPS + 1,
    "simulate_world": f"tp={GPUS}",
    "device": "cuda",
    "num_threads": 1,
    "profile_cache": "off",
    "progress": False,
    "admission": False,
}
WAYS: dict[str, dict[str, object]] = {
    "full recompute": {"recompute_granularity": "full", "offload_alpha": "off"},
    "alpha 0": {"offload_alpha": 0.0},
    "alpha auto": {"offload_alpha": "auto"},
    "alpha 1": {"offload_alpha": 1.0},
}
_STREAMED: dict[str, object] = {"offload_states": "all"}
ALLOCATORS = {"default": "", "expandable_segments": "expandable_segments:True", "planned": ""}
PLANNED_TOO = ("alpha 0", "alpha 1", "alpha auto")
"""Full recomputation of all layers asks for the same under any allocator; a plan for each of these."""


@dataclasses.dataclass(frozen=True)
class Case:
    model: str
    seq_length: int
    way: str
    are_states_streamed: bool

    @property
    def name(self) -> str:
        streamed = ", states streamed" if self.are_states_streamed else ""
        return f"{self.model}, {self.seq_length // 1024}K, {self.way}{streamed}"

    @property
    def flags(self) -> dict[str, object]:
        states = _STREAMED if self.are_states_streamed else {}
        return {**BASE, "seq_length": self.seq_length, **WAYS[self.way], **states}

    @property
    def device(self) -> Device:
        return H100 if self.way == "alpha auto" else ROOMY


def cases() -> Iterator[Case]:
    """Every way at every length; states are streamed in every second one."""
    for index, model in enumerate(("gpt-7b", "llama-3.1-8b")):
        for length in (64, 256, 1024):
            for way_index, way in enumerate(WAYS):
                yield Case(model, length * 1024, way, (index + way_index) % 2 == 1)


def run(case: Case, allocator: str) -> dict[str, Any]:
    """In a process of its own, which has the allocator from its start."""
    with tempfile.TemporaryDirectory() as folder:
        env = environment(case.device, Path(folder) / "gpu.txt", os.environ)
        env |= {"PYTORCH_ALLOC_CONF": ALLOCATORS[allocator]}
        command = [sys.executable, __file__, "--run", json.dumps([dataclasses.asdict(case), allocator, folder])]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    if done.returncode != 0:
        raise SystemExit(f"{case.name}, {allocator}: exit status {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def configuration(case: Case) -> RunConfig:
    return dataclasses.replace(RunConfig(), model=preset(case.model)).override(case.flags)


def measure(case: Case, allocator: str, folder: str) -> dict[str, Any]:
    """In the process of `run`."""
    import torch

    import memo
    from memo.emulated_gpu.face import EmulatedGpu

    config = configuration(case)
    if case.way == "alpha auto":
        config = config.override({"layer_profile": _modelled_profile(config, folder)})
    if allocator == "planned":
        config = config.override({"memory_planner": "auto"})
    start_s = time.perf_counter()
    gpu = EmulatedGpu()
    with memo.Trainer(config=config) as trainer:
        trainer.step()
        gpu.clear()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(STEPS):
            trainer.step()
        stats, counts = torch.cuda.memory_stats(), gpu.counts()
        chosen, transients = trainer.parts.chosen_swap, trainer.parts.transients
        found: dict[str, Any] = {
            "allocated_bytes": stats["allocated_bytes.all.peak"],
            "reserved_bytes": stats["reserved_bytes.all.peak"],
            "device_mallocs": counts.get("cudaMalloc", 0) + counts.get("cuMemCreate", 0),
            "pinned_bytes": gpu.taken_bytes()["pinned"],
            "tiles": None,
            "took_s": time.perf_counter() - start_s,
        }
        if chosen is not None and trainer.parts.swap is not None:
            found["tiles"] = chosen.solution.tiles
        if transients is not None:
            found |= _plan_facts(transients)
    return found


def _plan_facts(transients: Any) -> dict[str, Any]:
    statistics = transients.statistics()
    if statistics is None:
        return {"not_planned": transients.reason}
    return {
        "bound_bytes": transients.planned.plan.lower_bound_bytes,
        "arena_bytes": statistics.arena_bytes,
        "hits": statistics.hits,
        "fallbacks": sum(statistics.fallbacks.values()),
    }


def _modelled_profile(config: RunConfig, folder: str) -> str:
    """A layer's profile as the cost model foresees it on an H100, for the program of this process."""
    import datetime

    import torch

    from memo.artifacts.layer_profile import LayerProfile
    from memo.estimate.machines import find_hardware
    from memo.simulate.kernels import Kernels
    from memo.simulate.layer import swapped_layer
    from memo.simulate.swapping import swap_problem
    from memo.skeleton import bytes_of, skeletal_tensors
    from memo.train.layer_profile import profile_key
    from memo.train.setup import prepare

    config = prepare(config, must_fit=False).config
    dtype = config.training.params_dtype
    assert dtype is not None
    hardware = find_hardware("h100-80")
    layer = swapped_layer(config, Kernels(hardware, dtype))
    problem = swap_problem(config, GPUS, hardware, layer)
    profile = LayerProfile(
        key=profile_key(config, torch.device("cuda", 0)),
        measured_at=datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        tensor_bytes={
            tensor.name: bytes_of(tensor, config.data.seq_length, GPUS, dtype)
            for tensor in skeletal_tensors(config.model)
        },
        forward_s=problem.forward_s,
        backward_s=problem.backward_s,
        recompute_s={name: cost.total_s for name, cost in layer.recompute.items()},
        offload_bytes_per_s=problem.offload.alone_bytes_per_s,
        prefetch_bytes_per_s=problem.prefetch.alone_bytes_per_s,
        offload_under_compute_bytes_per_s=problem.offload.under_compute_bytes_per_s or 0.0,
        prefetch_under_compute_bytes_per_s=problem.prefetch.under_compute_bytes_per_s or 0.0,
    )
    path = str(Path(folder) / "profile.json")
    profile.save(path)
    return path


def foreseen(row: dict[str, Any]) -> RankMemory:
    """Of the run of a row, by memo's account of its own program."""
    config = dataclasses.replace(RunConfig(), model=preset(row["model"])).override(row["flags"])
    config = with_simulated_axes(config.override({"params_dtype": "bf16"}))
    return own_memory(config, GPUS, 0, moved=row["tiles"])


def table(kept: list[dict[str, Any]]) -> str:
    """Markdown; GiB of one rank."""
    heads = ("run", "foreseen", "allocated", "error", *(f"reserved, {name}" for name in ALLOCATORS), "pinned")
    lines = [heads, ("---",) * len(heads)]
    for name in dict.fromkeys(row["name"] for row in kept):
        by_allocator = {row["allocator"]: row for row in kept if row["name"] == name}
        row = by_allocator.get("expandable_segments") or next(iter(by_allocator.values()))
        expected, found = foreseen(row).allocated, row["allocated_bytes"]
        reserved = [by_allocator[a]["reserved_bytes"] / GIB if a in by_allocator else None for a in ALLOCATORS]
        cells = (name, f"{expected / GIB:.3f}", f"{found / GIB:.3f}", f"{expected / found - 1:+.2%}")
        pinned = f"{row['pinned_bytes'] / GIB:.1f}"
        lines.append((*cells, *("" if n is None else f"{n:.2f}" for n in reserved), pinned))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, default=list(ALLOCATORS))
    parser.add_argument("--run", help=argparse.SUPPRESS)  # what this script starts for each run
    parser.add_argument("--table", action="store_true", help="print the rows that are kept beside what memo foresees")
    options = parser.parse_args()
    if options.table:
        print(table(rows.read("full_size")))
        return 0
    if options.run:
        case, allocator, folder = json.loads(options.run)
        print(json.dumps(measure(Case(**case), allocator, folder)))
        return 0
    for case in cases():
        if not any(word in case.name for word in options.only):
            continue
        for allocator in options.allocators:
            if allocator == "planned" and case.way not in PLANNED_TOO:
                continue
            row = {"evidence": EVIDENCE, "name": case.name, **dataclasses.asdict(case), "flags": case.flags}
            rows.Journal("full_size").replace(
                {**row, "allocator": allocator, **run(case, allocator)}, "name", "allocator"
            )
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())

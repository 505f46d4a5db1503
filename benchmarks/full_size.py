"""Memory of one rank of eight at full size: foreseen by memo, and taken by its program on the emulated GPU.

    python -m memo.emulated_gpu -- python benchmarks/full_size.py [--only NAME ...] [--allocators NAME ...]

Needs a CUDA build of torch and no GPU (`make emulated` installs one: .venv-emulated/bin/python). Every row is one run
of three steps of `memo train --simulate-world tp=8`, or of another layout of eight ranks, without numbers
(csrc/emulated_gpu/README.md): Python, host code of operators and allocators are real. The rank is the one that needs
most memory. Peaks are those of the steps after the first. Under alpha auto the times of a layer and the rates of links,
which only a GPU can measure, are those of memo's model of an H100. A row replaces the earlier row of its run. Without
--allocators every run has a plan, and the runs of COMPARED also run with torch's own allocators.
"""

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import rows

from memo.config import RunConfig, preset
from memo.config.simulated_world import with_simulated_axes
from memo.emulated_gpu.launch import Device
from memo.estimate.machines import find_hardware
from memo.estimate.memory_account import memory_account, reserved_under_plan
from memo.estimate.rank_memory import RankMemory
from memo.rehearsal.request import STEADY_STEPS, RehearsalRequest
from memo.rehearsal.start import start
from memo.units import GIB

GPUS = 8
STEPS = STEADY_STEPS
"""Steps after the first, whose peaks count."""
EVIDENCE = "on the emulated GPU"
ROOMY_HOST_GIB = 2000
ROOMY = Device(memory_gib=180, host_memory_gib=ROOMY_HOST_GIB, without_numbers=True)
"""A device that holds all that a rank needs, so that this can be measured."""
H100 = dataclasses.replace(ROOMY, memory_gib=80)
"""The device for alpha auto, which decides by the memory of the device."""

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
    "memory_planner": "off",
}
WAYS: dict[str, dict[str, object]] = {
    "full recompute": {"recompute_granularity": "full", "offload_alpha": "off"},
    "alpha 0": {"offload_alpha": 0.0},
    "alpha auto": {"offload_alpha": "auto"},
    "alpha 1": {"offload_alpha": 1.0},
}
_STREAMED: dict[str, object] = {"offload_states": "all"}
_SWEPT: dict[str, object] = {"offload_granularity": "tile"}
ALLOCATORS = {"default": "", "expandable_segments": "expandable_segments:True", "planned": "expandable_segments:True"}
"""PYTORCH_ALLOC_CONF by the allocator of a step. `planned` needs it as well: torch serves all requests outside a plan.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A run; cp has the ranks that tp and pp do not take.

    `offload_tiles`: tiles of the sequence, None: memo's choice. `host_gib`: the part of its node's host memory that the
    rank may have.
    """

    model: str
    seq_length: int
    way: str
    are_states_streamed: bool = False
    tp: int = GPUS
    cp_comm_type: str = ""
    are_layers_swept: bool = False
    pp: int = 1
    num_sequences: int = 1
    offload_tiles: int | None = None
    host_gib: int = ROOMY_HOST_GIB

    @property
    def cp(self) -> int:
        return GPUS // self.tp // self.pp

    @property
    def name(self) -> str:
        layout = f", tp {self.tp} cp {self.cp} {self.cp_comm_type}" if self.cp > 1 else ""
        layout += f", tp {self.tp} pp {self.pp}, {self.num_sequences} sequences" if self.pp > 1 else ""
        swept = ", swept" if self.are_layers_swept else ""
        streamed = ", states streamed" if self.are_states_streamed else ""
        return f"{self.model}, {self.seq_length // 1024}K{layout}, {self.way}{swept}{streamed}"

    @property
    def flags(self) -> dict[str, object]:
        states = _STREAMED if self.are_states_streamed else {}
        swept = _SWEPT if self.are_layers_swept else {}
        swept |= {} if self.offload_tiles is None else {"offload_tiles": self.offload_tiles}
        lengths = {"seq_length": self.seq_length, "global_batch_size": self.num_sequences}
        return {**BASE, **lengths, **WAYS[self.way], **states, **swept, **self._layout}

    @property
    def _layout(self) -> dict[str, object]:
        """The layout of the rank that needs most. On a ring it is the last one, whose queries meet the keys of all
        ranks; in a pipeline one of the first stage, which has most microbatches in flight."""
        if self.pp > 1:
            return {"simulate_world": f"tp={self.tp},cp={self.cp},pp={self.pp}"}
        if self.cp == 1:
            return {}
        rank = GPUS - 1 if "p2p" in self.cp_comm_type else 0
        world = f"tp={self.tp},cp={self.cp}"
        return {"simulate_world": world, "simulate_rank": rank, "cp_comm_type": self.cp_comm_type}

    @property
    def device(self) -> Device:
        return dataclasses.replace(H100 if self.way == "alpha auto" else ROOMY, host_memory_gib=self.host_gib)


def cases() -> Iterator[Case]:
    yield from LAYOUTS
    yield from EXPERTS
    yield from LATENTS
    yield from DELTA_NETS
    yield from WINDOWS
    yield from _of_tp_alone()


LAYOUTS = (
    Case("gpt-7b", 64 * 1024, "full recompute", tp=4, cp_comm_type="p2p"),
    Case("llama-3.1-8b", 256 * 1024, "full recompute", tp=2, cp_comm_type="p2p"),
    Case("gpt-7b", 256 * 1024, "full recompute", tp=1, cp_comm_type="p2p"),
    Case("llama-3.1-8b", 64 * 1024, "full recompute", tp=4, cp_comm_type="all_gather"),
    Case("gpt-7b", 256 * 1024, "full recompute", tp=2, cp_comm_type="all_gather"),
    Case("llama-3.1-8b", 256 * 1024, "full recompute", tp=1, cp_comm_type="all_gather"),
    Case("gpt-7b", 64 * 1024, "full recompute", tp=4, cp_comm_type="a2a"),
    Case("llama-3.1-8b", 256 * 1024, "full recompute", tp=2, cp_comm_type="a2a"),
    Case("gpt-7b", 1024 * 1024, "full recompute", tp=1, cp_comm_type="a2a"),
    Case("llama-3.1-8b", 256 * 1024, "full recompute", tp=2, cp_comm_type="a2a+p2p"),
    Case("gpt-7b", 256 * 1024, "full recompute", tp=1, cp_comm_type="a2a+p2p"),
    Case("llama-3.1-8b", 64 * 1024, "alpha 0", tp=4, cp_comm_type="p2p"),
    Case("llama-3.1-8b", 64 * 1024, "alpha 0", tp=2, cp_comm_type="all_gather"),
    Case("gpt-7b", 64 * 1024, "alpha 1", tp=2, cp_comm_type="a2a"),
    Case("gpt-7b", 64 * 1024, "alpha 0", are_layers_swept=True),
    Case("llama-3.1-8b", 64 * 1024, "alpha 0", tp=2, cp_comm_type="a2a", are_layers_swept=True),
    Case("llama-3.1-8b", 1024 * 1024, "alpha 0", True, tp=2, cp_comm_type="a2a", are_layers_swept=True),
)
"""Every type of context parallelism at 2, 4 and 8 ranks, and swept layers."""

_NODE_HOST_GIB = 2048
_OF_A_PLAN: dict[str, Any] = {"tp": 4, "pp": 2, "num_sequences": 2, "host_gib": _NODE_HOST_GIB // GPUS}
EXPERTS = (
    Case("qwen3-30b-a3b", 64 * 1024, "alpha auto", **_OF_A_PLAN),
    Case("qwen3-30b-a3b", 1024 * 1024, "alpha auto", are_layers_swept=True, offload_tiles=32, **_OF_A_PLAN),
)
"""A mixture of experts over tp and pp, with what a node of 2 TiB of host memory has for each rank."""

LATENTS = (
    Case("deepseek-v2-lite", 128 * 1024, "alpha 1"),
    Case("glm-4.7-flash", 256 * 1024, "alpha auto", True, tp=4, cp_comm_type="p2p", host_gib=_NODE_HOST_GIB // GPUS),
)
"""Multi-latent attention: with values narrower than queries, and without a latent of queries; and with neither."""

DELTA_NETS = (Case("qwen3.5-9b", 128 * 1024, "alpha 0", tp=4, pp=2, num_sequences=2, offload_tiles=1),)
"""Gated delta nets in three layers of four, with the whole sequence in one tile, so that the gate takes most."""

WINDOWS = (
    Case("gemma-2-9b", 64 * 1024, "alpha 1", tp=4, cp_comm_type="p2p"),
    Case("gemma-4-31b", 64 * 1024, "alpha 1", are_states_streamed=True, tp=4, cp_comm_type="p2p"),
)
"""Windows in some layers, over a ring whose last rank has chunks that are neighbours; capped scores, or larger heads in
the layers without windows."""

COMPARED = (
    "gpt-7b, 64K, full recompute",
    "gpt-7b, 64K, alpha 1, states streamed",
    "gpt-7b, 256K, full recompute",
    "llama-3.1-8b, 64K, alpha 0",
)
"""Runs that are also measured with torch's own allocators."""


def _of_tp_alone() -> Iterator[Case]:
    """Yield every way at every length; every second run, and both alphas at the longest lengths, stream states."""
    for index, model in enumerate(("gpt-7b", "llama-3.1-8b")):
        for length in (64, 256, 1024):
            for way_index, way in enumerate(WAYS):
                is_second = (index + way_index) % 2 == 1
                yield Case(model, length * 1024, way, is_second)
                if length == 1024 and way in ("alpha 0", "alpha 1") and not is_second:
                    yield Case(model, length * 1024, way, True)


def run(case: Case, allocator: str) -> dict[str, Any]:
    """Run a case in a process of its own, which has the allocator from its start."""
    config = configuration(case)
    if allocator == "planned":
        config = config.override({"memory_planner": "auto"})
    request = RehearsalRequest(config, find_hardware("h100-80"))
    found = start(request, case.device, {"PYTORCH_ALLOC_CONF": ALLOCATORS[allocator]})
    steady = found.steady
    if steady is None:
        raise SystemExit(f"{case.name}, {allocator}: {found.shortage}")
    row: dict[str, Any] = {
        "allocated_bytes": steady.allocated_bytes,
        "reserved_bytes": steady.reserved_bytes,
        "device_mallocs": steady.num_device_mallocs,
        "pinned_bytes": steady.pinned_bytes,
        "tiles": found.tiles,
        "took_s": found.took_s,
    }
    return row if found.planned is None else row | dataclasses.asdict(found.planned)


def configuration(case: Case) -> RunConfig:
    return dataclasses.replace(RunConfig(), model=preset(case.model)).override(case.flags)


def foreseen(row: dict[str, Any]) -> RankMemory:
    """Return the memory of a row's run by memo's account of its own program."""
    config = dataclasses.replace(RunConfig(), model=preset(row["model"])).override(row["flags"])
    config = with_simulated_axes(config.override({"params_dtype": "bf16"}))
    return memory_account(config, GPUS, 0, moved=row["tiles"])


def table(kept: list[dict[str, Any]]) -> str:
    """Return Markdown with GiB of one rank, in a planned step if there is one, and the errors of the foreseen bytes."""
    reserved_by = (f"reserved, {name}" for name in ALLOCATORS)
    heads = ("run", "foreseen", "allocated", "error", *reserved_by, "error, planned", "pinned", "error, pinned")
    lines = [heads, ("---",) * len(heads)]
    for name in dict.fromkeys(row["name"] for row in kept):
        by_allocator = {row["allocator"]: row for row in kept if row["name"] == name}
        planned = by_allocator.get("planned")
        row = planned or by_allocator.get("expandable_segments") or next(iter(by_allocator.values()))
        memory, found = foreseen(row), row["allocated_bytes"]
        expected, in_pages = memory.allocated, reserved_under_plan(memory)
        reserved = [by_allocator[a]["reserved_bytes"] / GIB if a in by_allocator else None for a in ALLOCATORS]
        cells = (name, f"{expected / GIB:.3f}", f"{found / GIB:.3f}", f"{expected / found - 1:+.2%}")
        error = "" if planned is None else f"{in_pages / planned['reserved_bytes'] - 1:+.2%}"
        pinned = row["pinned_bytes"]
        of_host = (f"{pinned / GIB:.1f}", f"{memory.host / pinned - 1:+.2%}" if memory.host else "")
        lines.append((*cells, *("" if n is None else f"{n:.2f}" for n in reserved), error, *of_host))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="cases whose name holds one of these")
    parser.add_argument("--allocators", nargs="+", choices=ALLOCATORS, help="for every run; default: as above")
    parser.add_argument("--table", action="store_true", help="print the rows that are kept beside what memo foresees")
    options = parser.parse_args()
    if options.table:
        print(table(rows.read("full_size")))
        return 0
    for case in cases():
        if not any(word in case.name for word in options.only):
            continue
        by_default = reversed(ALLOCATORS) if case.name in COMPARED else ["planned"]
        for allocator in options.allocators or by_default:
            row = {"evidence": EVIDENCE, "name": case.name, **dataclasses.asdict(case), "flags": case.flags}
            rows.Journal("full_size").replace(
                {**row, "allocator": allocator, **run(case, allocator)}, "name", "allocator"
            )
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())

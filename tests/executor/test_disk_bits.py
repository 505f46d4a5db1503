"""Records on a disk change no bit: losses and gradients against the same run with all records in host memory.

torch.equal on the loss and on every gradient, fp32 and bf16, whole layers and swept ones, alone and on two ranks. Runs
on disk have poisoned buffers, and every access checked; copies and transfers run late, at random moments or in threads.
"""

from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from disk_runs import shared
from layouts import tiny
from ranks import run_ranks
from swapped_steps import Copies, Workplace, differences, observed, profiled_once

from memo.estimate.swap_memory import host_records
from memo.executor.runtime import SweepRuntime
from memo.spec.slots import slot_layout
from memo.train.build import ParallelModel

TILES = 8
LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "alone": (1, "llama-tiny", {"num_layers": 4, "global_batch_size": 1}),
    "tp2": (2, "llama-tiny", {"tp": 2, "num_layers": 3, "global_batch_size": 1}),
    "pp2": (2, "gpt-tiny", {"pp": 2, "num_layers": 6, "global_batch_size": 3}),
    "delta nets": (
        1,
        "qwen3.5-tiny",
        {"num_layers": 4, "global_batch_size": 1, "layer_types": "full,linear"},
    ),
    "experts": (1, "qwen3-moe-tiny", {"num_layers": 4, "global_batch_size": 1}),
}
OTHER_KINDS = ("delta nets", "experts")
"""Of these a slot holds something else: once in whole layers, once swept."""
GRANULARITIES: dict[str, dict[str, Any]] = {
    "layer": {},
    "tile": {"offload_granularity": "tile", "offload_slot_tiles": 2},
    "attention again": {"offload_granularity": "tile", "offload_slot_tiles": 2, "recompute_attention_layers": 1},
    "window": {"offload_granularity": "tile", "offload_slot_tiles": 1, "window_size": 11},  # keys move by sections
    "hidden states": {"offload_granularity": "tile", "offload_slot_tiles": 2, "offload_hidden_states": True},
}
ON_DISK: tuple[tuple[float, Copies], ...] = ((1.0, "lazy"), (0.5, "random"), (1.0, "threads"))
"""Share of the records of each kind, and when copies and transfers run."""


@dataclass
class Findings:
    unequal: list[str] = field(default_factory=list)
    disk_bytes: list[int] = field(default_factory=list)
    moved: list[int] = field(default_factory=list)


def foreseen(workplace: Workplace, common: dict[str, Any], directory: str, model: ParallelModel) -> int:
    """Host bytes of the account where all records are on disk that may be there: their staging buffers, and hidden
    states."""
    assert model.chosen_swap is not None
    config = workplace.config.override({**common, "offload_nvme_path": directory})
    layout = slot_layout(config, model.chosen_swap.solution.tiles)
    ((kinds, stays),) = host_records(config, workplace.world_size, (workplace.mesh.at.pp,), layout)
    return sum(kind.staging_bytes for kind in kinds) + stays


def examine(name: str, granularity: str, directory: str) -> Findings:
    world_size, model, overrides = LAYOUTS[name]
    workplace, findings = Workplace(tiny(model, **overrides), world_size), Findings()
    batches = workplace.batches(TILES)
    with profiled_once():
        for dtype in ("fp32", "bf16"):
            common: dict[str, Any] = {"params_dtype": dtype, "offload_tiles": TILES, "profile_cache": "off"}
            common |= {"offload_alpha": 0.5, **GRANULARITIES[granularity]}
            reference = workplace.step(workplace.build(**common), batches)
            for share, copies in ON_DISK:
                with observed(copies=copies), shared(share):
                    model_on_disk = workplace.build(**common, offload_nvme_path=directory)
                runtime = model_on_disk.swap
                assert runtime is not None
                with runtime.swapper.recorded() as recorder:
                    for step in range(2):
                        different = differences(workplace.step(model_on_disk, batches), reference)
                        if different:
                            findings.unequal.append(f"{dtype}, {share}, {copies}, step {step}: {different}")
                findings.disk_bytes.append(runtime.disk_bytes)
                findings.moved.append(sum(span.row == "prefetch" for span in recorder.spans()))
                host_bytes = foreseen(workplace, common, directory, model_on_disk)
                if share == 1.0 and runtime.host_bytes != host_bytes:
                    findings.unequal.append(f"{runtime.host_bytes} bytes in host memory, {host_bytes} foreseen")
                if isinstance(runtime, SweepRuntime):
                    assert (runtime.inputs is None) == (granularity != "attention again")
                    kinds = [runtime.swapper.records, runtime.key_swapper.records]
                    kinds += [] if runtime.inputs is None else [runtime.inputs.records]
                    assert all(records.disk_bytes > 0 for records in kinds)
                    assert runtime.disk_bytes == sum(records.disk_bytes for records in kinds)
    return findings


MORE = ("attention again", "hidden states")
"""Of these what differs on several ranks is not on a disk: full tests have those."""
PAIRS = [
    pytest.param(name, granularity, marks=[pytest.mark.full] * (LAYOUTS[name][0] > 1 and granularity in MORE))
    for name, granularity in product(LAYOUTS, GRANULARITIES)
    if (name, granularity) != ("pp2", "hidden states")  # refused
    and (name not in OTHER_KINDS or granularity in ("layer", "tile"))
]


@pytest.mark.parametrize(("name", "granularity"), PAIRS)
def test_records_on_disk_change_no_bit(name: str, granularity: str, tmp_path: Path) -> None:
    ranks = run_ranks(LAYOUTS[name][0], examine, name, granularity, str(tmp_path))
    assert [found.unequal for found in ranks] == [[]] * len(ranks)
    assert all(all(found.moved) and all(found.disk_bytes) for found in ranks), "a run in which nothing was on disk"
    assert list(tmp_path.iterdir()) == []

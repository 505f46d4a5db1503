"""The cost of sweeping layers tile by tile, compared with layers that are swapped whole; and its use by `memo plan`.

    python -m memo.emulated_gpu -- python benchmarks/sweep_speed.py [--only foreseen rehearsed plan]

Three kinds of rows, each with the class of its evidence; no time here is measured on a GPU.

    foreseen    seconds of a step by memo.simulate, for each size of tiles and for whole layers, all activations moved
    rehearsed   seconds of a step of the program, without numbers, on the emulated GPU's modelled clock (memo rehearse);
                needs a CUDA build of torch. Only with few layers and not with the smallest tiles, as it takes minutes
    plan        seconds of the step that `memo plan` answers with at a million tokens: with all sizes of tiles among
                its candidates, with the smallest only, and with whole layers only

Rows replace earlier rows of the same kind.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any
from unittest.mock import patch

import rows

from memo.config import RunConfig, preset
from memo.config.derived import SLOT_TILES, SWEPT_TOKENS, resolved_offload_tiles, resolved_slot_tiles, swept_tiles
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.node_share import with_lone_link
from memo.search import ask, search
from memo.simulate.predict import predict_step
from memo.units import GIB

NAME = "sweep_speed"
FORESEEN = "foreseen"
REHEARSED = "rehearsed on the emulated GPU, modelled time"
LENGTHS = (1 << 18, 1 << 19, 1 << 20)
TIMEOUT_S = 1800


@dataclass(frozen=True)
class Machine:
    """All GPUs of a node are one tp group."""

    model: str
    gpus: int
    hardware: str

    def run(self, seq_length: int, **flags: object) -> RunConfig:
        values = {"seq_length": seq_length, "tp": self.gpus, "device": "cuda", "offload_alpha": 1.0}
        return RunConfig(model=preset(self.model)).override({**values, "global_batch_size": 1, **flags})


MACHINES = (
    Machine("llama-3.1-8b", 8, "h100-80"),
    Machine("gpt-7b", 8, "a800-80"),
    Machine("llama-3.1-8b", 1, "h100-80"),
)
REHEARSALS = ((MACHINES[0], 2, LENGTHS[0]), (MACHINES[0], 4, LENGTHS[0]))
"""Machine, layers and tokens of the rehearsals: their difference is the time that two layers add to a step."""


def in_sizes(whole: RunConfig) -> Iterator[RunConfig]:
    """Yield the run swept in each size of tiles, at most an eighth of the sequence, with the slots of `memo plan`."""
    swept = whole.override({"offload_granularity": "tile", "offload_slot_tiles": SLOT_TILES})
    least = resolved_offload_tiles(whole)
    for tiles in dict.fromkeys(max(least, swept_tiles(swept, tokens, SLOT_TILES)) for tokens in SWEPT_TOKENS):
        yield swept.override({"offload_tiles": tiles})


def foreseen() -> Iterator[dict[str, Any]]:
    for machine in MACHINES:
        hardware = with_lone_link(HARDWARE[machine.hardware], machine.gpus)
        for length in LENGTHS:
            whole = machine.run(length)
            whole_s = predict_step(whole, machine.gpus, hardware).step_time_s
            for run in in_sizes(whole):
                step_s = predict_step(run, machine.gpus, hardware).step_time_s
                yield _row("foreseen", FORESEEN, machine, run, whole_s, step_s)


def rehearsed() -> Iterator[dict[str, Any]]:
    for machine, layers, length in REHEARSALS:
        whole = machine.run(length, num_layers=layers)
        whole_s, whole_bytes = _rehearse(machine, whole)
        for run in [*in_sizes(whole)][:-1]:
            step_s, num_bytes = _rehearse(machine, run)
            gib = {"gpu_gib": num_bytes / GIB, "whole_layers_gpu_gib": whole_bytes / GIB}
            yield _row("rehearsed", REHEARSED, machine, run, whole_s, step_s) | gib


def _row(kind: str, evidence: str, machine: Machine, run: RunConfig, whole_s: float, step_s: float) -> dict[str, Any]:
    return {
        "kind": kind,
        "evidence": evidence,
        "model": machine.model,
        "gpus": machine.gpus,
        "hardware": machine.hardware,
        "layers": run.model.num_layers,
        "seq_length": run.data.seq_length,
        "tiles": resolved_offload_tiles(run),
        "slot_tiles": resolved_slot_tiles(run),
        "whole_layers_s": whole_s,
        "swept_s": step_s,
        "ratio": step_s / whole_s,
    }


def _rehearse(machine: Machine, run: RunConfig) -> tuple[float, int]:
    """Return the modelled seconds of a step and the peak of allocated bytes of one rank; all ranks are alike."""
    flags = {
        "model": machine.model,
        "num-layers": run.model.num_layers,
        "seq-length": run.data.seq_length,
        "tp": run.parallel.tp,
        "global-batch-size": 1,
        "offload-alpha": run.memory.offload_alpha,
        "offload-granularity": run.memory.offload_granularity,
        "offload-tiles": resolved_offload_tiles(run),
        **({"offload-slot-tiles": resolved_slot_tiles(run)} if run.memory.sweeps else {}),
        "gpu": machine.hardware,
        "gpus": machine.gpus,
    }
    command = [sys.executable, "-m", "memo", "rehearse", "--json"]
    command += [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT_S, cwd=rows.ROOT)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()}")
    steady = json.loads(done.stdout)[0]["steady"]
    return steady["times"]["step_time_s"], steady["allocated_bytes"]


@contextmanager
def offering(sizes: tuple[int, ...]) -> Iterator[None]:
    """Let the search know only tiles of these sizes; without sizes layers are whole."""
    with ExitStack() as patches:
        replaced = {"SWEPT_TOKENS": sizes} if sizes else {"sweeps": lambda *_, **__: iter(())}
        for name, value in replaced.items():
            for module in _search_modules():
                if hasattr(module, name):
                    patches.enter_context(patch.object(module, name, value))
        yield


def _search_modules() -> list[ModuleType]:
    """Return the modules that import the sizes under names of their own."""
    return [module for name, module in sys.modules.items() if name.startswith("memo.search.")]


def plan() -> Iterator[dict[str, Any]]:
    length = LENGTHS[-1]
    offers = {"all sizes": SWEPT_TOKENS, "the smallest tiles": SWEPT_TOKENS[-1:], "whole layers": ()}
    for model, hardware in (("llama-3.1-8b", "h100-80"), ("gpt-7b", "a800-80")):
        for gpus in (1, 8):
            question = ask(model, gpus, seq_len=length, hardware=hardware, global_batch_size=gpus)
            answers: dict[str, dict[str, Any] | None] = {}
            for offer, sizes in offers.items():
                with offering(sizes):
                    best = search(question, top=1).best
                answers[offer] = (
                    None
                    if best is None
                    else {
                        "layout": str(best.layout),
                        "activations": str(best.strategy),
                        "step_s": best.step.step_time_s,
                    }
                )
            yield {
                "kind": "plan",
                "evidence": FORESEEN,
                "model": model,
                "gpus": gpus,
                "hardware": hardware,
                "seq_length": length,
                "answers": answers,
            }


KINDS = {"foreseen": foreseen, "rehearsed": rehearsed, "plan": plan}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=KINDS, default=list(KINDS))
    only = parser.parse_args().only
    journal = rows.Journal(NAME)
    journal.rows = [row for row in rows.read(NAME) if row["kind"] not in only]
    for kind in only:
        for row in KINDS[kind]():
            journal.add(row)


if __name__ == "__main__":
    main()

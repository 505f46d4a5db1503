"""Errors of memo on published runs: seconds of a step, to which nothing was fitted, and memory of a rank.

    python benchmarks/held_out_accuracy.py

simumax b200   SimuMax's runs of Megatron-LM on 8 B200 (tests/golden/README.md): dense models, each step of 4 to 32
               microbatches of one sequence. SimuMax's own errors are compared; it measures kernels of the same shapes.
               memo's efficiencies of B200 are round figures from those kernels, not from these steps.
               Memory is the peak of torch's allocator; SimuMax predicts it, and memo by fused_memory.py. It is not held
               out: the requests that differ from those of older runs were found by looking at these runs.
               The reserved memory is compared with memo's account of Megatron-LM with kernels that are not fused, which
               was fitted to older runs (memo.estimate.calibration).
"""

import argparse
import csv
import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

import rows
from frameworks import MEGATRON_LM
from fused_memory import fused_allocated_bytes
from simulator_accuracy import GOLDEN, with_efficiency

from memo.config import ModelConfig, RunConfig, preset
from memo.estimate.accounts import Account
from memo.estimate.hardware import Efficiency, Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.node_share import with_lone_link
from memo.estimate.time_errors import StepParts, time_error
from memo.simulate import StepPrediction, predict_step
from memo.simulate.framework import MEMO, Framework
from memo.spec.shapes import shape_of
from memo.units import GIB

NAME = "held_out_accuracy"
GPUS = 8


@dataclass(frozen=True)
class Held:
    """A published run as memo would run it, and its measurements; `other` is the prediction of another tool."""

    source: str
    model: str
    config: RunConfig
    hardware: str
    step_s: float
    reserved_gib: float | None = None
    other_step_s: float | None = None
    other_gib: float | None = None
    allocated_gib: float | None = None
    framework: Framework = MEMO
    gpus: int = GPUS

    @property
    def machine(self) -> Hardware:
        return with_lone_link(HARDWARE[self.hardware], self.gpus)

    def foreseen(self, efficiency: Efficiency | None = None) -> StepPrediction:
        hardware = with_efficiency(self.machine, efficiency)
        return predict_step(self.config, self.gpus, hardware, framework=self.framework)

    def longer(self, efficiency: Efficiency | None = None) -> float:
        """Return measured / foreseen seconds - 1."""
        return self.step_s / self.foreseen(efficiency).step_time_s - 1

    def parts(self) -> StepParts:
        return self.foreseen().parts

    def bar(self) -> float:
        """Return the error that memo prints for the step, as a share of it."""
        return time_error(self.machine, self.parts()).share

    def row(self) -> dict[str, Any]:
        """Return the row of the run; errors are foreseen / measured - 1."""
        parallel, training = self.config.parallel, self.config.training
        foreseen = self.foreseen()
        found: dict[str, Any] = {
            "source": self.source,
            "model": self.model,
            "layers": self.config.model.num_layers,
            "seq_length": self.config.data.seq_length,
            "tp_cp_pp": (parallel.tp, parallel.cp, parallel.pp),
            "sequences": training.global_batch_size,
            "step_s": self.step_s,
            "error": foreseen.step_time_s / self.step_s - 1,
            "bar": self.bar(),
        }
        if self.reserved_gib and self.allocated_gib:
            shape = shape_of(self.config.model, self.model, self.config.data.seq_length)
            fitted_bytes = Account("megatron-lm", shape, self.gpus).worst(self.config).total
            allocated_bytes = fused_allocated_bytes(self.config, shape, self.gpus)
            found["memory_error"] = allocated_bytes / GIB / self.allocated_gib - 1
            found["fitted_memory_error"] = fitted_bytes / GIB / self.reserved_gib - 1
        if self.other_step_s and self.other_gib and self.allocated_gib:
            found["other_error"] = self.other_step_s / self.step_s - 1
            found["other_memory_error"] = self.other_gib / self.allocated_gib - 1
        return found


def simumax() -> list[Held]:
    found = []
    with (GOLDEN / "simumax_b200_measured.csv").open(newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            tp, cp, pp = (int(row[name]) for name in ("tp", "cp", "pp"))
            sequences = GPUS // (tp * cp * pp) * int(row["microbatches"])
            values: dict[str, Any] = {"seq_length": int(row["seq_len"]), "tp": tp, "cp": cp, "pp": pp, "mbs": 1}
            values |= {"gbs": sequences, "device": "cuda", "offload_alpha": "off"}
            values |= {"cp_comm_type": "a2a"} if cp > 1 else {}
            model = replace(_MODELS[row["model"]], num_layers=int(row["layers"]))
            found.append(
                Held(
                    "simumax b200",
                    row["model"],
                    RunConfig(model=model).override(values),
                    "b200",
                    float(row["step_ms"]) / 1e3,
                    float(row["reserved_gib"]),
                    float(row["simumax_step_ms"]) / 1e3,
                    float(row["simumax_allocated_gib"]),
                    float(row["allocated_gib"]),
                    MEGATRON_LM,
                )
            )
    return found


def summary(source: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a row with the errors over all rows of a source."""
    told: dict[str, Any] = {"summary": source, "rows": len(found)}
    for name in ("error", "memory_error", "fitted_memory_error", "other_error", "other_memory_error"):
        errors = [row[name] for row in found if name in row]
        if errors:
            told[f"mean_{name}"] = statistics.mean(map(abs, errors))
            told[f"bias_of_{name}"] = statistics.mean(errors)
            told[f"worst_{name}"] = max(errors, key=abs)
    return told


_LLAMA_70B = preset("llama-3.1-70b")
_MODELS: dict[str, ModelConfig] = {
    "llama-3-70b": _LLAMA_70B,
    "llama-3.1-405b": replace(
        _LLAMA_70B, hidden_size=16384, ffn_hidden_size=53248, num_attention_heads=128, num_query_groups=16
    ),
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = [run.row() for run in simumax()]
    results = [summary("simumax b200", found), *found]
    for row in results:
        print(json.dumps(row))
    print(f"kept in {rows.write(NAME, results)}")


if __name__ == "__main__":
    main()

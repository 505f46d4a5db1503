"""How well memo foresees published runs: seconds of a step, to which nothing was fitted, and memory of a rank.

    python benchmarks/held_out_accuracy.py

simumax b200   SimuMax's runs of Megatron-LM on 8 B200 (tests/golden/README.md), dense models, each step of 4 to 32
               microbatches of one sequence; beside memo's error stands that of SimuMax, which measures kernels of the
               very shapes. memo's efficiencies of B200 are round figures from those kernels, not from these steps.
               Memory is what torch's allocator gave at most, which SimuMax foresees too, by fused_memory.py. It is not
               held out: which requests differ from those of older runs was found by looking at these runs.
               And, beside what was reserved, the account of Megatron-LM on kernels that are not fused, which was fitted
               to older runs (memo.estimate.calibration).
trl 1m         TRL 1.13's guide: Qwen3-8B, one sequence of 1,048,576 tokens on 8 H100 over a ring, layers recomputed
               (github.com/huggingface/trl, docs/source/long_context_training.md): 380.1 s. FSDP gathers weights, which
               is not counted here.
"""

import argparse
import csv
import json
import statistics
from dataclasses import dataclass, replace
from typing import Any

import rows
from fused_memory import fused_allocated_bytes
from simulator_accuracy import GOLDEN

from memo.config import ModelConfig, RunConfig, preset
from memo.estimate.accounts import Account
from memo.estimate.hardware_table import HARDWARE
from memo.simulate import predict_step
from memo.simulate.framework import MEGATRON_LM, MEMO, Framework
from memo.spec.shapes import shape_of
from memo.units import GIB

NAME = "held_out_accuracy"
GPUS = 8


@dataclass(frozen=True)
class Held:
    """A published run as memo would run it, and what was measured; `other` is what another tool foresees."""

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

    def row(self) -> dict[str, Any]:
        """Errors: foreseen over measured, less 1."""
        parallel, training = self.config.parallel, self.config.training
        foreseen = predict_step(self.config, GPUS, HARDWARE[self.hardware], framework=self.framework)
        found: dict[str, Any] = {
            "source": self.source,
            "model": self.model,
            "layers": self.config.model.num_layers,
            "seq_length": self.config.data.seq_length,
            "tp_cp_pp": (parallel.tp, parallel.cp, parallel.pp),
            "sequences": training.global_batch_size,
            "step_s": self.step_s,
            "error": foreseen.step_time_s / self.step_s - 1,
        }
        if self.reserved_gib and self.allocated_gib:
            shape = shape_of(self.config.model, self.model, self.config.data.seq_length)
            fitted_bytes = Account("megatron-lm", shape, GPUS).worst(self.config).total
            allocated_bytes = fused_allocated_bytes(self.config, shape, GPUS)
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


def trl() -> list[Held]:
    values = {"seq_length": 1 << 20, "cp": GPUS, "gbs": 1, "device": "cuda"}
    values |= {"offload_alpha": "off", "recompute_granularity": "full"}
    return [Held("trl 1m", "qwen3-8b", RunConfig(model=preset("qwen3-8b")).override(values), "h100-80", 380.1)]


def summary(source: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Of all rows of a source."""
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
    results = []
    for runs in (simumax(), trl()):
        found = [run.row() for run in runs]
        results += [summary(runs[0].source, found), *found]
    for row in results:
        print(json.dumps(row))
    print(f"kept in {rows.write(NAME, results)}")


if __name__ == "__main__":
    main()

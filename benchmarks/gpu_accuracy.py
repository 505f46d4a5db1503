"""Step time and memory of runs on a GPU, measured and foreseen.

    python benchmarks/gpu_accuracy.py [--only NAME ...] [--minutes 5]
    python -m memo.emulated_gpu -- python benchmarks/gpu_accuracy.py --rehearse

A row is one run in a fresh process: one rank of eight without collectives (--simulate-world), or a whole model. The
foreseen values are computed when the table is drawn, for memo's own machine of the GPU's name. A row replaces an
earlier row of the same name on the same kind of GPU. There is no smoke size. --rehearse needs no GPU: it adds to each
kept row the bytes that the program allocates on the emulated GPU, without numbers.
"""

import dataclasses
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import measure
from measure import Case, in_fresh_process, measured
from rows import Journal, environment, read, write
from scales import parser, resolve
from ways import WAYS

from memo.config import RunConfig, preset
from memo.config.derived import rank_tokens, vocab_rows_per_rank
from memo.config.simulated_world import with_simulated_axes
from memo.emulated_gpu.launch import environment as emulated
from memo.estimate.machines import find_hardware
from memo.estimate.memory_account import memory_account
from memo.estimate.node_share import with_lone_link
from memo.rehearsal.request import emulated_device
from memo.simulate.composed import passes_s
from memo.simulate.kernels import Kernels
from memo.simulate.outside_layers import loss_cost
from memo.simulate.predict import predict_step

K = 1024
MODEL = "llama-3.1-8b"
WORLD, GPUS = "tp=8", 8
LORA: dict[str, Any] = {"lora_rank": 16}
SOON: dict[str, Any] = {"memory_planner": "off"}
"""Flags of whole models: a memory plan would take two more steps before the first."""
FILE = "full/gpu_accuracy"
_AT_ONCE = 1e9
_HOST_GIB = 125.0
"""Host memory of the emulated machine, as on the machine of the kept rows."""


def cases(device: str) -> dict[str, Case]:
    """Return the cases by name, the most important first."""

    def whole(preset: str, seq_length: int, steps: int = 2, **flags: Any) -> Case:
        return Case("memo", preset, seq_length, device, warmup=1, steps=steps, flags={**SOON, **flags})

    def rank(way: str, seq_length: int, layers: int, steps: int = 2) -> tuple[str, Case]:
        """Return a case with fewer layers than the model has, so that a GPU's time suffices for more rows."""
        case = Case(way, MODEL, seq_length, device, {"num_layers": layers}, WORLD, warmup=1, steps=steps)
        return f"{MODEL} of {layers} layers, one rank of {GPUS}, {seq_length // K}K, {way}", case

    return {
        **dict(
            rank(way, 128 * K, layers=16) for way in ("full-swap-plan", "none", "full-recompute", "layer-input-offload")
        ),
        f"{MODEL}, LoRA, 128K": whole(MODEL, 128 * K, steps=1, **LORA),
        "gpt-oss-20b, QLoRA, 64K": whole("gpt-oss-20b", 64 * K, steps=1, **LORA, quantize="nf4", offload_tiles=8),
        **dict([rank("full-swap-plan", 1024 * K, layers=2, steps=1)]),
        **dict(rank(way, 32 * K, layers=16) for way in ("full-swap-plan", "none")),
        "qwen3.5-4b, LoRA, 32K": whole("qwen3.5-4b", 32 * K, **LORA, delta_backend="torch"),
        "llama-3.2-1b, 128K": whole("llama-3.2-1b", 128 * K),
    }


def foreseen(row: dict[str, Any]) -> dict[str, float]:
    """Return the foreseen values for a row's run, with the tiles that it moved; empty for ways that are not memo's own.

    Messages between ranks take no time, because a rank that runs alone sends none. It also has the link to the host for
    itself.
    """
    way = WAYS[row["way"]]
    if way.start is not None or way.under_autograd:
        return {}
    world = row["simulated_world"]
    flags = {"mock_data": True, "device": "cuda", "params_dtype": "bf16", **way.flags, **row["flags"]}
    flags |= {"seq_length": row["seq_length"], "simulate_world": world}
    model = dataclasses.replace(preset(row["model"]), **row["shape"])
    config = with_simulated_axes(dataclasses.replace(RunConfig(), model=model).override(flags))
    gpus, tiles = GPUS if world else 1, row["tiles"]
    if tiles is None:
        memory = dataclasses.replace(config.memory, offload_alpha="off")  # which keeps --offload-tiles
        config = dataclasses.replace(config, memory=memory)
    hardware = with_lone_link(find_hardware(row["device"]), 1)
    silent = dataclasses.replace(hardware.efficiency, collective_s=0.0)
    hardware = dataclasses.replace(hardware, node_gb_per_s=_AT_ONCE, network_gb_per_s=_AT_ONCE, efficiency=silent)
    step = predict_step(config, gpus, hardware, tiles)
    memory = memory_account(config, gpus, 0, moved=tiles)
    more_s = _older_kernels_s(config, Kernels(hardware, "bf16"))
    return {"step_s": step.step_time_s + more_s, "allocated_bytes": memory.allocated}


def _older_kernels_s(config: RunConfig, kernels: Kernels) -> float:
    """Return the seconds that torch's kernels took more in the code that the kept rows have measured.

    The backward of the loss made norm and logits again, and passed 33 times over the logits instead of 13 times. The
    backward of SwiGLU passed four times more over its output. Left out: two passes of RoPE, the activation of gpt-oss,
    and the time of the host, which started 10 to 15 % more kernels for a layer. To be dropped with these rows.
    """
    older, today = (loss_cost(config, kernels, again) for again in (True, False))
    again_s = older.forward.total_s + older.backward.total_s - today.backward.total_s
    model, tokens = config.model, rank_tokens(config)
    logits = tokens * vocab_rows_per_rank(model.vocabulary, config.parallel.tp)
    active = tokens * model.token_ffn_size // config.parallel.tp * model.num_layers
    more = ((33 - 13, logits), (4 if model.activation == "swiglu" else 0, active))
    return again_s + sum(passes_s(kernels, passes, elements * kernels.narrow) for passes, elements in more)


def beside_foresight(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows with their foreseen values and errors, and with the share of the speed of keeping everything."""
    kept_s = {_of_length(row): row["step_p50_s"] for row in lines if row["way"] == "none" and row["status"] == "ok"}
    shown = []
    for row in lines:
        if row["status"] == "ok":
            if expected := foreseen(row):
                row = row | {
                    "foreseen_s": expected["step_s"],
                    "time_off_percent": 100 * (expected["step_s"] / row["step_p50_s"] - 1),
                    "memory_off_percent": 100 * (expected["allocated_bytes"] / row["allocated_peak_bytes"] - 1),
                }
            if kept_s.get(_of_length(row)) and row["way"] != "none":
                row = row | {"of_ideal": kept_s[_of_length(row)] / row["step_p50_s"]}
        shown.append(row)
    return shown


def rehearsed_bytes(row: dict[str, Any]) -> int:
    """Return the peak bytes that the program of a row allocates on the emulated GPU."""
    case = cases("cuda")[row["name"]]
    machine = dataclasses.replace(find_hardware(row["device"]), host_memory_gib=_HOST_GIB)
    device = emulated_device(1, machine, timed="")
    with tempfile.TemporaryDirectory() as folder:
        variables = emulated(device, Path(folder) / "gpu.txt", os.environ) | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, measure.__file__, json.dumps(dataclasses.asdict(case))]
        found = in_fresh_process(command, 600.0, variables)
    print(row["name"], found["status"], found.get("message", ""), flush=True)
    return int(found["allocated_peak_bytes"])


def _of_length(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["device"], row["model"], row["layers"], row["seq_length"], row["simulated_world"]


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="runs whose name holds one of these")
    asked.add_argument("--rehearse", action="store_true", help="add what kept rows take on the emulated GPU")
    options = asked.parse_args()
    if options.rehearse:
        write(FILE, [{**row, "emulated_bytes": rehearsed_bytes(row)} for row in read(FILE)])
        return
    args = resolve(options)
    if args.scale.device != "cuda":
        print("nothing is measured: these runs have one size, and need a CUDA device")
        return
    journal, device = Journal(FILE), environment()["device"]
    for name, case in cases(args.scale.device).items():
        if any(word in name for word in options.only):
            journal.replace({"name": name, "device": device, **measured(args, case)}, "name", "device")


if __name__ == "__main__":
    main()

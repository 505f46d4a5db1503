"""Step time and memory on a GPU, beside what memo foresees of the same run.

    python benchmarks/gpu_accuracy.py [--only NAME ...] [--minutes 5]

A row is one run in a fresh process: one rank of eight without collectives (--simulate-world), or a whole model. What is
foreseen is worked out from the rows when their table is drawn, on memo's own machine of that name. A row takes the
place of an earlier one of the same name on the same kind of GPU.
"""

import dataclasses
from typing import Any

from measure import Case, measured
from rows import Journal, environment
from scales import parser, resolve
from ways import WAYS

from memo.config import RunConfig, preset
from memo.config.simulated_world import with_simulated_axes
from memo.estimate.machines import find_hardware
from memo.estimate.node_share import with_lone_link
from memo.estimate.own_memory import own_memory
from memo.simulate.predict import predict_step

K = 1024
MODEL = "llama-3.1-8b"
WORLD, GPUS = "tp=8", 8
LORA: dict[str, Any] = {"lora_rank": 16}
SOON: dict[str, Any] = {"memory_planner": "off"}
"""Of whole models: a plan for memory would take three more steps before the first."""


_AT_ONCE = 1e9


def cases(device: str) -> dict[str, Case]:
    """By name, in order of what matters most."""

    def whole(preset: str, seq_length: int, steps: int = 2, **flags: Any) -> Case:
        return Case("memo", preset, seq_length, device, warmup=1, steps=steps, flags={**SOON, **flags})

    def rank(way: str, seq_length: int, layers: int, steps: int = 2) -> tuple[str, Case]:
        """Fewer layers than the model has, for more rows in the time that a GPU is there: each takes what it takes."""
        case = Case(way, MODEL, seq_length, device, {"num_layers": layers}, WORLD, warmup=1, steps=steps)
        return f"{MODEL} of {layers} layers, one rank of {GPUS}, {seq_length // K}K, {way}", case

    return {
        **dict(
            rank(way, 128 * K, layers=16) for way in ("full-swap-plan", "none", "full-recompute", "layer-input-offload")
        ),
        f"{MODEL}, LoRA, 128K": whole(MODEL, 128 * K, steps=1, **LORA),
        "gpt-oss-20b, QLoRA, 64K": whole("gpt-oss-20b", 64 * K, steps=1, **LORA, quantize="nf4"),
        **dict([rank("full-swap-plan", 1024 * K, layers=2, steps=1)]),
        **dict(rank(way, 32 * K, layers=16) for way in ("full-swap-plan", "none")),
        "qwen3.5-4b, LoRA, 32K": whole("qwen3.5-4b", 32 * K, **LORA),
        "llama-3.2-1b, 128K": whole("llama-3.2-1b", 128 * K),
    }


def foreseen(row: dict[str, Any]) -> dict[str, float]:
    """Of the run of a row, with the tiles that it moved; nothing of ways that are not memo's own.

    What ranks would tell each other takes no time: a rank that runs alone does not send it. It has the link to the host
    for itself as well.
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
        config = config.override({"offload_alpha": "off"})
    hardware = with_lone_link(find_hardware(row["device"]), 1)
    silent = dataclasses.replace(hardware.efficiency, collective_s=0.0)
    hardware = dataclasses.replace(hardware, node_gb_per_s=_AT_ONCE, network_gb_per_s=_AT_ONCE, efficiency=silent)
    step = predict_step(config, gpus, hardware, tiles)
    memory = own_memory(config, gpus, 0, moved=tiles)
    return {
        "step_s": step.step_time_s,
        "hidden_share": step.hidden_share,
        "mfu_percent": step.mfu_percent,
        "allocated_bytes": memory.allocated,
    }


def main() -> None:
    asked = parser(__doc__)
    asked.add_argument("--only", nargs="+", metavar="NAME", default=[""], help="runs whose name holds one of these")
    options = asked.parse_args()
    args = resolve(options)
    journal, device = Journal(f"{args.scale.name}/gpu_accuracy"), environment()["device"]
    for name, case in cases(args.scale.device).items():
        if any(word in name for word in options.only):
            journal.replace({"name": name, "device": device, **measured(args, case)}, "name", "device")


if __name__ == "__main__":
    main()

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
from scales import Shape, parser, resolve
from ways import WAYS

from memo.config import RunConfig, preset
from memo.config.simulated_world import with_simulated_axes
from memo.estimate.machines import find_hardware
from memo.estimate.own_memory import own_memory
from memo.simulate.predict import predict_step

K = 1024
RANK = Shape("llama-3.1-8b", (("num_layers", 16),))
"""Half of the layers, for twice the rows in the time that a GPU is there: what a layer takes is the same."""
WORLD = "tp=8"
GPUS = 8
LORA: dict[str, Any] = {"lora_rank": 16}


def cases(device: str) -> dict[str, Case]:
    """By name, in order of what matters most."""

    def one(way: str, shape: Shape, seq_length: int, world: str | None = None, **flags: Any) -> Case:
        return Case(way, shape.preset, seq_length, device, dict(shape.fields), world, warmup=1, steps=2, flags=flags)

    return {
        **{
            f"llama-3.1-8b of 16 layers, one rank of 8, 128K, {way}": one(way, RANK, 128 * K, WORLD)
            for way in ("full-swap-plan", "none", "full-recompute", "layer-input-offload")
        },
        "llama-3.1-8b, LoRA, 64K": one("memo", Shape("llama-3.1-8b"), 64 * K, **LORA),
        "llama-3.2-1b, 128K": one("memo", Shape("llama-3.2-1b"), 128 * K),
        "gpt-oss-20b, QLoRA, 64K": one("memo", Shape("gpt-oss-20b"), 64 * K, **LORA, quantize="nf4"),
        "qwen3.5-4b, LoRA, 32K": one("memo", Shape("qwen3.5-4b"), 32 * K, **LORA),
    }


def foreseen(row: dict[str, Any]) -> dict[str, float]:
    """Of the run of a row, with the tiles that it moved; nothing of ways that are not memo's own."""
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
    step = predict_step(config, gpus, find_hardware(row["device"]), tiles)
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

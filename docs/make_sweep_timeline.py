"""Draws what a step moves whose layers are swept, from its plans and modelled times alone.

    python docs/make_sweep_timeline.py

Four layers of Llama-3.1-8B on 262,144 tokens over tp 8 of an H100, in four sections: one layer recomputes attention,
hidden states are in host memory, and a part of the records is on disks of 56 GB/s a node.
"""

import sys
from pathlib import Path

from memo.config import RunConfig, preset
from memo.estimate.machines import find_hardware
from memo.planner.swap import sweep_plans
from memo.simulate.kernels import Kernels
from memo.simulate.layer import swapped_layer
from memo.simulate.streams import LayerTimes
from memo.simulate.swapping import modelled_problem
from memo.spec.hidden_ops import stage_hidden_ops
from memo.spec.layer_ops import stage_ops, swept_ops
from memo.spec.schedule import Pipeline
from memo.spec.slots import slot_layout
from memo.spec.sweep import key_value_layout

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from swap_drawing import draw_swaps
from sweep_timeline import SweepTimes, simulate_sweep

IMAGE = Path(__file__).parent / "images" / "sweep_timeline.svg"
LAYERS, SECTIONS, RANKS, DISK_BYTES_PER_S = 4, 4, 8, 56e9
IN_MEMORY = 6
"""Records of activations; the others are on the disks."""


def main() -> None:
    hardware, config = find_hardware("h100-80"), RunConfig(model=preset("llama-3.1-8b"))
    swept = {"offload_granularity": "tile", "offload_tiles": SECTIONS, "offload_slot_tiles": 1, "device": "cuda"}
    sizes = {"num_layers": LAYERS, "seq_length": 262_144, "tp": RANKS, "offload_alpha": 1.0, "params_dtype": "bf16"}
    config = config.override({**swept, **sizes, "recompute_attention_layers": 1, "offload_hidden_states": True})
    layer = modelled_problem(config, RANKS, hardware, swapped_layer(config, Kernels(hardware, "bf16")))
    layout, pipeline = slot_layout(config, 1.0), Pipeline(1, 1, 1)

    def copies(num_bytes: int, forward_s: float = 0.0, backward_s: float = 0.0, in_memory: int = -1) -> LayerTimes:
        disk_s = num_bytes * RANKS / DISK_BYTES_PER_S if in_memory >= 0 else 0.0
        rates = hardware.offload_gb_per_s * 1e9, hardware.prefetch_gb_per_s * 1e9
        offload_s, prefetch_s = (num_bytes / rate for rate in rates)
        return LayerTimes(forward_s, backward_s, offload_s, prefetch_s, True, disk_s, disk_s, max(0, in_memory))

    input_bytes = layout.places["input"].num_bytes
    times = SweepTimes(
        copies(layout.moved_bytes, layer.forward_s, layer.backward_s, IN_MEMORY),
        copies(key_value_layout(config).part_bytes),
        copies(input_bytes),
        copies(input_bytes),
    )
    ops = swept_ops(stage_ops(pipeline, 0, LAYERS), SECTIONS, again={0})
    plans = sweep_plans(ops, stage_hidden_ops(pipeline, 0, LAYERS, SECTIONS))
    title = f"{LAYERS} layers of Llama-3.1-8B, swept in {SECTIONS} sections of 65,536 tokens, tp 8, H100 (modelled)"
    draw_swaps(simulate_sweep(*plans, times, LAYERS), IMAGE, title)


if __name__ == "__main__":
    main()

"""The program starts as many kernels for a layer as memo.simulate.host says, which foresees when small layers wait."""

import json
from pathlib import Path

import pytest
from own_process import run

from memo.config import RunConfig, preset
from memo.emulated_gpu.launch import Device
from memo.simulate.host import kernels_of_layer

PROGRAM = """
import dataclasses, json, sys
import memo
from memo.config import RunConfig, preset
from memo.emulated_gpu.face import EmulatedGpu

gpu, counts = EmulatedGpu(), []
for layers in (2, 4):
    model = dataclasses.replace(preset({model!r}), num_layers=layers)
    config = dataclasses.replace(RunConfig(), model=model).override(json.loads({values!r}))
    with memo.Trainer(config=config) as trainer:
        trainer.step()
        gpu.clear()
        trainer.step()
        counts.append(gpu.counts()["kernels"])
print((counts[1] - counts[0]) / 2)
"""
WAYS = {
    "kept": {"offload_alpha": "off"},
    "recomputed": {"offload_alpha": "off", "recompute_granularity": "full"},
    "2 tiles": {"offload_alpha": 0.5, "offload_tiles": 2},
    "8 tiles": {"offload_alpha": 0.5, "offload_tiles": 8},
    "shared experts": {"offload_alpha": "off", "moe_shared_expert_intermediate_size": 64},
    "shared experts, 8 tiles": {
        "offload_alpha": 0.5,
        "offload_tiles": 8,
        "moe_shared_expert_intermediate_size": 64,
    },
    "by sigmoid": {"offload_alpha": "off", "moe_layer_freq": ""},
    "by sigmoid, 8 tiles": {"offload_alpha": 0.5, "offload_tiles": 8, "moe_layer_freq": ""},
    "swept in 4 tiles": {"offload_alpha": 0.5, "offload_tiles": 4, "offload_granularity": "tile"},
}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(("qwen3-tiny", way) for way in WAYS if "shared" not in way and "sigmoid" not in way),
        *(("qwen3-moe-tiny", way) for way in ("kept", "2 tiles")),
        *(("gpt-oss-tiny", way) for way in ("recomputed", "8 tiles")),
        *(("qwen3-moe-tiny", way) for way in ("shared experts", "shared experts, 8 tiles")),
        *(("glm-4.5-tiny", way) for way in ("by sigmoid", "by sigmoid, 8 tiles")),
        *(("gemma-3-tiny", way) for way in WAYS if "shared" not in way and "sigmoid" not in way),
    ],
)
def test_as_many_kernels_as_foreseen(tmp_path: Path, model: str, way: str) -> None:
    """Of experts with numbers: without any, all tokens go to one of them."""
    values = {"mock_data": True, "seq_length": 512, "global_batch_size": 1, "train_iters": 2, "device": "cuda"}
    values |= {"num_threads": 1, "profile_cache": "off", "progress": False, "memory_planner": "off", **WAYS[way]}
    config = RunConfig(model=preset(model)).override(values)
    device = Device(without_numbers=not config.model.num_experts, memory_gib=20, host_memory_gib=64)
    done = run(tmp_path, PROGRAM.format(model=model, values=json.dumps(values)), device)
    assert done.returncode == 0, done.stderr
    foreseen = sum(kernels_of_layer(config, swaps=config.memory.swaps))
    assert float(done.stdout.split()[-1]) == pytest.approx(foreseen, rel=0.08)

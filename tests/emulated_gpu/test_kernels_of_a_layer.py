"""The program starts as many kernels for a layer as memo.simulate.host says, which foresees when small layers wait."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from own_process import run

from memo.config import RunConfig, preset
from memo.config.derived import layer_tiles
from memo.emulated_gpu.launch import Device
from memo.simulate.delta import GROUP_KERNELS, kernels_of_delta
from memo.simulate.host import kernels_of_layer

PROGRAM = """
import dataclasses, json, sys
import memo
from memo.config import RunConfig, preset
from memo.config.derived import layer_tiles
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
OF_DELTA = """
import json
import torch
from memo.attention import delta_rule
from memo.emulated_gpu.face import EmulatedGpu
from memo.spec.delta import group_tokens

heads, dim, gpu, counts = 128, 8, EmulatedGpu(), []
for groups in (1, 3):
    tokens = groups * group_tokens(heads, 1)
    narrow = {"dtype": torch.bfloat16, "device": "cuda"}
    parameters = (torch.ones(size, **narrow) for size in ((2 * heads * dim, 4), (heads,), (heads,)))
    net = delta_rule.DeltaNet(*parameters, dim)
    mixed = torch.ones(tokens, 1, (2 * dim + 2) * heads, **narrow)
    place, carry = delta_rule.Place(None, 0), net.empty_carry(mixed)
    out, after = torch.empty_like(mixed[..., : heads * dim]), torch.empty_like(carry)
    gradients = delta_rule.Gradients(*(torch.zeros_like(x) for x in (mixed, carry, *net[:3])))
    gpu.clear()
    delta_rule.forward(net, mixed, carry, place, out, after)
    torch.cuda.synchronize()
    counts.append(gpu.counts()["kernels"])
    gpu.clear()
    delta_rule.backward(net, out, mixed, carry, place, gradients)
    torch.cuda.synchronize()
    counts.append(gpu.counts()["kernels"])
print(json.dumps([counts[2] - counts[0], counts[3] - counts[1], group_tokens(heads, 1)]))
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
    "adapters": {"offload_alpha": "off", "lora_rank": 8},
    "adapters, 8 tiles": {"offload_alpha": 0.5, "offload_tiles": 8, "lora_rank": 8},
    "swept in 4 tiles": {"offload_alpha": 0.5, "offload_tiles": 4, "offload_granularity": "tile"},
}


@pytest.mark.parametrize(
    ("model", "way"),
    [
        *(("qwen3-tiny", way) for way in WAYS if "shared" not in way and "sigmoid" not in way),
        *(("qwen3-moe-tiny", way) for way in ("kept", "2 tiles", "adapters")),
        *(("gpt-oss-tiny", way) for way in ("recomputed", "8 tiles")),
        *(("qwen3-moe-tiny", way) for way in ("shared experts", "shared experts, 8 tiles")),
        *((model, way) for model in ("glm-4.5-tiny", "deepseek-tiny") for way in ("by sigmoid", "by sigmoid, 8 tiles")),
        *(
            ("gemma-3-tiny", way)
            for way in WAYS
            if not {"shared", "sigmoid", "adapters"} & set(way.replace(",", "").split())
        ),
    ],
)
def test_as_many_kernels_as_foreseen(tmp_path: Path, model: str, way: str) -> None:
    """Of experts with numbers: without any, all tokens go to one of them."""
    values = {"mock_data": True, "seq_length": 512, "global_batch_size": 1, "train_iters": 2, "device": "cuda"}
    values |= {"vocab_size": 257}
    values |= {"num_threads": 1, "profile_cache": "off", "progress": False, "memory_planner": "off", **WAYS[way]}
    config = RunConfig(model=preset(model)).override(values)
    device = Device(without_numbers=not config.model.num_experts, memory_gib=20, host_memory_gib=64)
    done = run(tmp_path, PROGRAM.format(model=model, values=json.dumps(values)), device)
    assert done.returncode == 0, done.stderr
    foreseen = sum(kernels_of_layer(config, layer_tiles(config), swaps=config.memory.swaps))
    assert float(done.stdout.split()[-1]) == pytest.approx(foreseen, rel=0.08)


def test_a_delta_net_starts_as_many_kernels_as_foreseen(tmp_path: Path) -> None:
    """Two groups of tokens more, forward and backward."""
    done = run(tmp_path, OF_DELTA, Device(without_numbers=True, memory_gib=20, host_memory_gib=64))
    assert done.returncode == 0, done.stderr
    *counted, group = json.loads(done.stdout.splitlines()[-1])
    model = replace(preset("qwen3.5-tiny"), num_attention_heads=128)
    one, three = (RunConfig(model=model).override({"seq_length": group * n, "micro_batch_size": 1}) for n in (1, 3))
    assert counted == [kernels_of_delta(three, each) - kernels_of_delta(one, each) for each in (False, True)]
    swept = one.override({"offload_alpha": 0.5, "offload_tiles": 2, "offload_granularity": "tile"})
    assert kernels_of_delta(swept, backward=False) == kernels_of_delta(one, backward=False) + GROUP_KERNELS[False]

"""Training on several emulated GPUs, as under torchrun: every axis over NCCL has the numbers of one GPU, and no race.

A layout has the same bits under every schedule, and with planned memory or without. Against one GPU the bound is one
step of bf16 for losses, and four for gradient norms: sums over ranks round otherwise.
"""

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulated_flows import LAYOUT, LAYOUTS, steps_of
from forked import TIMEOUT_S
from own_process import run_ranks

import memo
from memo.emulated_gpu.face import EmulatedGpu
from memo.emulated_gpu.launch import Device, environment

PROGRAM = Path(__file__).with_name("ranks_of_training.py")
BY_TORCHRUN = 2
"""So many ranks are started by torchrun itself, others with the variables that it sets: to start takes long."""
SCHEDULES = {2: ["lazy:0", "random:0"], 4: ["lazy:0", "eager:0"], 8: ["lazy:0"]}
OTHER_MODELS = ("window_size", "layer_types", "attention_sinks")
"""Options that change what a model computes; all others change how."""
LOSSES, NORMS = 2.0**-8, 2.0**-6


@functools.cache
def on_one_gpu(model: tuple[tuple[str, Any], ...]) -> list[float]:
    EmulatedGpu().set_schedule("eager")
    with memo.Trainer("llama-tiny", **LAYOUT, **dict(model)) as trainer:
        return steps_of(trainer, 2)


@pytest.mark.parametrize("ranks", LAYOUTS)
def test_layouts_have_the_numbers_of_one_gpu(gpu: EmulatedGpu, tmp_path: Path, ranks: int) -> None:
    device, file = Device(check_races=True, poison=True), tmp_path / "found.json"
    arguments = [str(file), *SCHEDULES[ranks]]
    if ranks == BY_TORCHRUN:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command, env = [*launcher, str(PROGRAM), *arguments], environment(device, tmp_path / "gpu.txt")
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=env, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr[-6000:]
    else:
        run_ranks(tmp_path, ranks, PROGRAM, device, arguments)
    found = json.loads(file.read_text())
    assert found.keys() == LAYOUTS[ranks].keys()
    for name, numbers in found.items():
        options = LAYOUTS[ranks][name]
        expected = on_one_gpu(tuple((name, options[name]) for name in OTHER_MODELS if name in options))
        first = numbers[SCHEDULES[ranks][0]]
        assert all(other == first for other in numbers.values()), name
        assert first[::2] == pytest.approx(expected[::2], rel=LOSSES), name
        assert first[1::2] == pytest.approx(expected[1::2], rel=NORMS), name
        without_plan = name.removesuffix(", planned")
        assert numbers == found[without_plan], f"{name} has other bits than {without_plan}"

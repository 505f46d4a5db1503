"""torch's kernels pass over memory as often as memo.simulate.composed says, counted on the timed emulated GPU."""

import json
from typing import get_args

import pytest
from own_process import run

from memo.config import RunConfig
from memo.config.model import Activation
from memo.emulated_gpu.launch import Device
from memo.estimate.machines import find_hardware
from memo.simulate.composed import (
    FUSED_NORM,
    ROTATION,
    SUM_BEFORE_NORM,
    Passes,
    activation_passes,
    loss_passes,
    norm_passes,
)
from memo.simulate.kernels import Kernels

MACHINE, GB = "h100-80", 1e9
ROWS, WIDTH = 1 << 18, 4096
PROGRAM = """
import json, time
import torch
from memo_kernels import select_ops

ops, rows, width, kinds = select_ops("torch", torch.bfloat16), {rows}, {width}, {kinds}
narrow = {{"dtype": torch.bfloat16, "device": "cuda"}}

def taken_s(function):
    torch.cuda.synchronize()
    start_s = time.perf_counter()
    made = function()
    torch.cuda.synchronize()
    return time.perf_counter() - start_s, made

def both_s(function, *inputs):
    forward_s, made = taken_s(function)
    grads = [torch.empty_like(each) for each in made] if isinstance(made, tuple) else torch.empty_like(made)
    return forward_s, taken_s(lambda: torch.autograd.grad(made, inputs, grads))[0]

def values(*shape, dtype=torch.bfloat16):
    return torch.empty(*shape, dtype=dtype, device="cuda").requires_grad_()

x, residual, found = values(rows, 1, width), values(rows, 1, width), {{}}
for name, dtype in (("norm", torch.bfloat16), ("wide norm", torch.float32)):
    weight = values(width, dtype=dtype)
    found[name] = both_s(lambda: ops.norm(x, weight, None, 1e-6), x, weight)
    found[f"sum and {{name}}"] = taken_s(lambda: ops.add_norm(x, residual, weight, None, 1e-6))[:1]
for kind, times in kinds.items():
    inner = values(rows, 1, times * width)
    found[kind] = both_s(lambda: ops.activate(inner, kind), inner)
    del inner
with torch.no_grad():
    heads, angles = x.view(rows, 1, -1, 128), torch.empty(rows, 1, 1, 64, **narrow)
    found["rotation"] = [taken_s(lambda: ops.rotate_(heads, angles, angles, back=back))[0] for back in (False, True)]
    logits, labels = x.view(rows, width), torch.empty(rows, dtype=torch.int64, device="cuda")
    of_rows = torch.empty(rows, device="cuda")
    sums_s, (maximum, total, _, exponentials) = taken_s(lambda: ops.logit_sums(logits, labels, width, lambda own: own))
    of_gradient = (logits, exponentials, labels, maximum, total, of_rows, width)
    found["loss"] = (sums_s, taken_s(lambda: ops.logit_gradient_(*of_gradient))[0])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Passes over a value of ROWS x WIDTH, by operation: of the forward, and of the backward."""
    kinds = {kind: 2 if "glu" in kind else 1 for kind in get_args(Activation)}
    device = Device(without_numbers=True, memory_gib=500, host_memory_gib=64, timed=MACHINE)
    program = PROGRAM.format(rows=ROWS, width=WIDTH, kinds=kinds)
    done = run(tmp_path_factory.mktemp("passes"), program, device)
    assert done.returncode == 0, done.stderr
    hardware = find_hardware(MACHINE)
    pass_s = ROWS * WIDTH * 2 / (hardware.memory_gb_per_s * GB * hardware.efficiency.memory)
    found: dict[str, list[float]] = json.loads(done.stdout.splitlines()[-1])
    return {name: [seconds / pass_s for seconds in each] for name, each in found.items()}


def passes(**values: object) -> tuple[RunConfig, Kernels]:
    return RunConfig().override({"device": "cuda", **values}), Kernels(find_hardware(MACHINE), "bf16")


def test_norms(counted: dict[str, list[float]]) -> None:
    """To 0.1 passes: launches, and rows of one number."""
    of = {"norm": passes(), "wide norm": passes(apply_layernorm_1p=True)}
    for name, (config, kernels) in of.items():
        forward, backward = norm_passes(config, kernels)
        assert counted[name] == pytest.approx([forward, backward], abs=0.1)
        assert counted[f"sum and {name}"] == pytest.approx([2 + SUM_BEFORE_NORM + forward], abs=0.1)
    assert norm_passes(*of["norm"]) == FUSED_NORM


@pytest.mark.parametrize("kind", get_args(Activation))
def test_activations(counted: dict[str, list[float]], kind: str) -> None:
    """A fused kernel reads the input and writes the output; its backward reads both gradients' values and the input."""
    inputs = 2 if "glu" in kind else 1
    more = activation_passes(passes(activation=kind)[0])
    assert counted[kind] == pytest.approx([inputs + 1 + more.forward, 2 * inputs + 1 + more.backward], abs=0.2)


def test_rotation(counted: dict[str, list[float]]) -> None:
    assert counted["rotation"] == pytest.approx([2 + ROTATION] * 2, abs=0.15)


def test_loss(counted: dict[str, list[float]]) -> None:
    assert Passes(*counted["loss"]) == pytest.approx(loss_passes(*passes()), abs=0.1)

"""A plan for packed documents at full size: the real program of one rank of eight, without numbers.

Four layers of each shape, in minutes; `make test-full` runs all layers. What the numbers are is shown at small sizes:
by the flows "packed" of emulated_flows.py (test_training.py), and on CPUs by tests/train/test_train_packed_plan.py.
"""

import json
from pathlib import Path

import pytest
from own_process import run

from memo.emulated_gpu.launch import Device
from memo.units import GIB

ROOMY = Device(memory_gib=180, host_memory_gib=2000, without_numbers=True)
MOST_RESERVED = 1.03
"""Of what torch allocates for the most demanding packing, without a plan."""
OVER_SEGMENTS = 1.002
"""Of what torch's expandable segments reserve for that packing alone, at most."""
FORESEEN = 0.015
"""As in the full-size table of docs/memory.md."""
PROGRAM = Path(__file__).with_name("packed_steps.py")
EXPANDABLE = "expandable_segments:True"

ALONE = ("tp=8", "p2p", 1)
CASES = [
    pytest.param("gpt-7b", 64 * 1024, "flash", "off", ALONE, id="64K-flash"),
    pytest.param("llama-3.1-8b", 64 * 1024, "cudnn", "off", ALONE, id="64K-cudnn"),
    pytest.param("llama-3.1-8b", 256 * 1024, "flash", "0", ALONE, id="256K-flash"),
    pytest.param("gpt-7b", 256 * 1024, "cudnn", "0", ALONE, id="256K-cudnn"),
    # FlashAttention copies what is strided: heads that were exchanged, rows of several samples.
    pytest.param("llama-3.1-8b", 64 * 1024, "flash", "off", ("tp=2,cp=4", "a2a", 1), id="64K-flash-a2a"),
    pytest.param("llama-3.1-8b", 64 * 1024, "flash", "off", ("tp=8", "p2p", 2), id="64K-flash-2-rows"),
]


def steps(tmp_path: Path, planner: str, *words: object) -> dict[str, int]:
    done = run(tmp_path, PROGRAM, ROOMY, [*map(str, words), planner], PYTORCH_ALLOC_CONF=EXPANDABLE)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(("model", "seq_length", "backend", "alpha", "layout"), CASES)
@pytest.mark.parametrize("num_layers", [4, pytest.param(32, marks=pytest.mark.full)])
def test_one_plan_serves_every_packing(
    tmp_path: Path, model: str, seq_length: int, backend: str, alpha: str, layout: tuple[object, ...], num_layers: int
) -> None:
    words = (model, seq_length, backend, alpha, num_layers, *layout)
    planned, plain = steps(tmp_path, "default", *words), steps(tmp_path, "off", *words)
    print({name: round(n / GIB, 3) if n > GIB // 100 else n for name, n in planned.items()})
    print({name: round(n / GIB, 3) for name, n in plain.items()})
    assert planned["requests"] > 0 and planned["fallbacks"] == 0 and planned["unasked"] == 0
    assert planned["reserved"] <= MOST_RESERVED * plain["allocated"]
    assert planned["reserved"] < OVER_SEGMENTS * plain["reserved"]
    assert planned["reserved"] == pytest.approx(planned["foreseen"], rel=FORESEEN)

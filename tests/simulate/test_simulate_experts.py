"""Steps of a mixture of experts: published ones, and what they consist of."""

from dataclasses import replace
from typing import Any

import pytest
from frameworks import FSDP

from memo.config import RunConfig, preset
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.time_errors import time_error
from memo.simulate.predict import predict_step

GPUS = 8
RL_S = 0.67
"""What an RL run takes beyond a supervised one, by pairs of dense models (benchmarks/step_sources.py)."""
LONG = {"seq_length": 262144}
"""So many that gradients of experts are not bound by the memory of their sums, as they may be on tiles."""
PRIME_RL = {
    "h100-80 rl": ("h100-80", 8.174 - RL_S),
    "h200 rl": ("h200", 7.401 - RL_S),
    "h200": ("h200", 7.173),
}
"""Seconds of a step of Qwen3-30B-A3B, two sequences of 16K tokens a GPU, all weights trained, layers recomputed
(PrimeIntellect-ai/prime-rl, benchmarks/baselines, commit 559b4477)."""


def run(model: str = "qwen3-30b-a3b", **values: Any) -> RunConfig:
    common: dict[str, Any] = {"seq_length": 16384, "mbs": 1, "gbs": 2 * GPUS, "device": "cuda", "offload_alpha": "off"}
    return RunConfig(model=preset(model)).override({**common, "recompute_granularity": "full", **values})


@pytest.mark.parametrize("name", PRIME_RL)
def test_published_steps_are_foreseen(name: str) -> None:
    """Within 7 %, which is within the error that is printed beside them."""
    machine, measured_s = PRIME_RL[name]
    hardware, config = HARDWARE[machine], run()
    step = predict_step(config, GPUS, hardware, framework=FSDP)
    assert step.step_time_s == pytest.approx(measured_s, rel=0.07)
    assert time_error(hardware, step.parts).share > 0.07


def _matmul_s(config: RunConfig, hardware: Hardware) -> float:
    return predict_step(config, GPUS, hardware, framework=FSDP).seconds["matmul"]


def test_experts_take_what_a_token_runs_through_and_not_what_there_is() -> None:
    """As many experts a token of as many take the same; twice as many a token take twice as long, but for the rest of
    the layer."""
    hardware = HARDWARE["h100-80"]
    like_dense = replace(hardware, efficiency=replace(hardware.efficiency, expert_matmul=1.0, matmul_half_size=1e-3))
    times = [_matmul_s(run(moe_router_topk=top_k, **LONG), like_dense) for top_k in (4, 8, 16)]
    assert times[2] - times[1] == pytest.approx(2 * (times[1] - times[0]), rel=0.02)
    dense = _matmul_s(
        run(
            "qwen3-8b",
            num_layers=48,
            hidden_size=2048,
            ffn_hidden_size=8 * 768,
            vocab_size=151936,
            num_attention_heads=32,
            num_query_groups=4,
            **LONG,
        ),
        like_dense,
    )
    assert times[1] == pytest.approx(dense, rel=0.1)
    assert _matmul_s(run(**LONG), hardware) > 1.5 * times[1]

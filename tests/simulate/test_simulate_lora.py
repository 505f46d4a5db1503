"""Steps of LoRA: published ones, and what adapters and few bits add to a step of a frozen model."""

from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.time_errors import time_error
from memo.simulate.framework import FSDP
from memo.simulate.model import step_model
from memo.simulate.parts import step_parts
from memo.simulate.predict import predict_step
from memo.spec.flops import model_flops_per_token

PRIME_RL = {("h100-80", 1): 31.492, ("h100-80", 8): 32.001, ("h200", 8): 31.425}
"""Seconds of a step of Qwen3-4B with LoRA of rank 16, two sequences of 64K tokens a GPU, layers recomputed
(tests/golden/prime_rl_measured.csv). Its row of 16K tokens on B200, with FlashAttention 2, takes three times what is
foreseen; so do those without LoRA."""


def run(gpus: int = 1, seq_length: int = 65536, **values: Any) -> RunConfig:
    common: dict[str, Any] = {"seq_length": seq_length, "mbs": 1, "gbs": 2 * gpus, "device": "cuda"}
    common |= {"offload_alpha": "off", "recompute_granularity": "full", "params_dtype": "bf16"}
    return RunConfig(model=preset("qwen3-4b")).override({**common, **values})


@pytest.mark.parametrize(("machine", "gpus"), PRIME_RL)
def test_published_steps_are_foreseen(machine: str, gpus: int) -> None:
    """Within 5 %, which is within the error that is printed beside them."""
    hardware, config = HARDWARE[machine], run(gpus, lora_rank=16)
    step, model = (make(config, gpus, hardware, framework=FSDP) for make in (predict_step, step_model))
    assert step.step_time_s == pytest.approx(PRIME_RL[machine, gpus], rel=0.05)
    assert time_error(hardware, step_parts(step, model, config)).share > 0.05


def test_a_frozen_model_spares_the_products_of_weight_gradients() -> None:
    """A third of those without recomputation; adapters of rank 16 give back a little."""
    seconds = {
        name: predict_step(run(recompute_granularity="none", **values), 1, HARDWARE["h100-80"]).seconds["matmul"]
        for name, values in {
            "full": {},
            "frozen": {"train_only": "final_norm.weight"},
            "lora": {"lora_rank": 16},
        }.items()
    }
    assert seconds["frozen"] == pytest.approx(2 / 3 * seconds["full"], rel=0.05)
    assert seconds["frozen"] < seconds["lora"] < 0.9 * seconds["full"]


def test_few_bits_cost_a_pass_over_the_weights() -> None:
    plain, coded = (
        predict_step(run(lora_rank=16, quantize=quantize), 1, HARDWARE["h100-80"]).seconds["elementwise"]
        for quantize in ("none", "nf4")
    )
    weights = 36 * (2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728)
    passes = 2 * 2 * weights * (0.5 + 4 + 8 + 1 / 16 + 2) / 3.35e12  # two microbatches, forward and backward
    assert passes < coded - plain < 2 * passes


def test_a_frozen_weight_has_no_flops_of_a_gradient() -> None:
    """2 P less of those that are frozen, and 6 of each of an adapter's."""
    full, lora = (model_flops_per_token(run(lora_rank=rank).model, 1) for rank in (0, 16))
    layer = 2560 * (4096 + 2 * 1024) + 4096 * 2560 + 3 * 2560 * 9728
    adapters = 16 * (2560 + 4096 + 2 * (2560 + 1024) + 4096 + 2560 + 2 * (2560 + 9728) + 9728 + 2560)
    assert full - lora == 2 * (36 * layer + 2560 * 151936) - 6 * 36 * adapters

"""Steps of LoRA: published ones, and what adapters and few bits add to a step of a frozen model."""

from typing import Any

import pytest
from frameworks import FSDP

from memo.config import RunConfig, preset
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.time_errors import FLASH_2, TimeError, time_error
from memo.simulate.predict import predict_step
from memo.spec.flops import model_flops_per_token

MIXTURES = {"qwen3-30b-a3b": 79.471, "glm-4.5-air": 202.342}
"""Seconds of a step of mixtures of experts with LoRA of rank 16, two sequences of 64K tokens a GPU, layers recomputed,
by 8 B200 with FlashAttention 2; INTELLECT-3 has the shape of GLM-4.5-Air (PrimeIntellect-ai/prime-rl,
benchmarks/baselines, commit 559b4477). They chose nothing. Steps of dense models are in
tests/estimate/test_estimate_step_sources.py."""


def run(gpus: int = 1, seq_length: int = 65536, model: str = "qwen3-4b", **values: Any) -> RunConfig:
    common: dict[str, Any] = {"seq_length": seq_length, "mbs": 1, "gbs": 2 * gpus, "device": "cuda"}
    common |= {"offload_alpha": "off", "recompute_granularity": "full", "params_dtype": "bf16"}
    return RunConfig(model=preset(model)).override({**common, **values})


def foreseen(model: str, backend: str) -> tuple[float, TimeError]:
    config = run(8, model=model, lora_rank=16, attention_backend=backend)
    step = predict_step(config, 8, HARDWARE["b200"], framework=FSDP)
    return step.step_time_s, time_error(HARDWARE["b200"], step.parts)


@pytest.mark.parametrize("model", MIXTURES)
def test_attention_of_b200_under_flash_attention_2_is_foreseen_for_other_models(model: str) -> None:
    """Steps are 7 % and 20 % longer, within the error that is printed."""
    step_s, error = foreseen(model, "flash")
    assert 0.05 < MIXTURES[model] / step_s - 1 < error.share < 0.27
    assert FLASH_2 in error.evidence
    by_cudnn_s, told = foreseen(model, "cudnn")
    assert step_s > 2.5 * by_cudnn_s and FLASH_2 not in told.evidence


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

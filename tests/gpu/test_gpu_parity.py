"""The same training on a CPU and on a GPU, by how wrong bf16 itself is."""

from typing import Any
from unittest import mock

import pytest
import torch
from gpu_sizes import SHORTER

from memo import Trainer
from memo.attention.delta_kernels import choose_delta
from memo.parallel import data
from memo.parallel.shards import ShardedParameter, initialize

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

RUN: dict[str, Any] = {
    "mock_data": True,
    "seq_length": 256 // SHORTER,
    "micro_batch_size": 2,
    "train_iters": 4,
    "lr": 1e-3,
    "memory_planner": "off",
}
STEPS = 3


def figures(device: str, dtype: str, **run: Any) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    with mock.patch.object(data, "initialize", drawn_on_a_cpu):
        trainer = Trainer(**RUN, **run, device=device, params_dtype=dtype, profile_cache="off", progress=False)
    return [(record.lm_loss, record.grad_norm) for record in (trainer.step() for _ in range(STEPS))]


def drawn_on_a_cpu(parameter: ShardedParameter, seed: int) -> None:
    """The same initial weights on every device: a GPU's generator has other numbers for the same seed."""
    drawn = torch.empty_like(parameter, device="cpu")
    drawn.shard = parameter.shard  # type: ignore[attr-defined]
    initialize(drawn, seed)  # type: ignore[arg-type]
    with torch.no_grad():
        parameter.copy_(drawn)


def error(found: list[tuple[float, float]], exact: list[tuple[float, float]]) -> list[float]:
    """Of losses and of gradient norms: the largest, relative to the exact value."""
    return [max(abs(f[i] - e[i]) / abs(e[i]) for f, e in zip(found, exact, strict=True)) for i in range(2)]


def assert_as_exact_as_cpu(on_gpu: dict[str, Any] | None = None, **run: Any) -> None:
    """bf16 against fp64 on a CPU. Bound: three times the error of bf16 on a CPU, or four roundings of bf16."""
    exact = figures("cpu", "fp64", **run)
    cpu = error(figures("cpu", "bf16", **run), exact)
    gpu = error(figures("cuda", "bf16", **run, **(on_gpu or {})), exact)
    floor = 4 * torch.finfo(torch.bfloat16).eps
    assert [g <= max(3 * c, floor) for g, c in zip(gpu, cpu, strict=True)] == [True, True], (gpu, cpu)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("alpha", ["off", 0.5])
@pytest.mark.parametrize("model", ["gpt-tiny", "llama-tiny"])
def test_gpu_is_as_exact_as_cpu(model: str, alpha: str | float, kernels: str) -> None:
    if kernels == "triton":
        pytest.importorskip("triton", reason="Triton is not installed")
    assert_as_exact_as_cpu({"kernels": kernels}, model=model, offload_alpha=alpha)


KINDS = ("qwen3-tiny", "qwen3-moe-tiny", "gpt-oss-tiny", "gemma-3-tiny", "qwen3.5-tiny", "glm-4.5-tiny", "olmo-3-tiny")
KINDS += ("deepseek-tiny", "gemma-2-tiny", "gemma-4-moe-tiny")
"""Windows, sinks, experts with their choices, gated delta nets, norms after a block, latents, caps."""


@pytest.mark.parametrize("model", KINDS)
def test_every_kind_of_layer_is_as_exact_as_on_a_cpu(model: str) -> None:
    assert_as_exact_as_cpu(model=model, offload_alpha=0.5)


@pytest.mark.parametrize("quantize", ["none", "nf4", "int8"])
def test_adapters_are_as_exact_as_on_a_cpu(quantize: str) -> None:
    assert_as_exact_as_cpu(model="llama-tiny", offload_alpha=0.5, lora_rank=8, quantize=quantize)


@pytest.mark.parametrize("alpha", ["off", 0.5])
def test_delta_nets_by_fla_are_as_exact_as_on_a_cpu(alpha: str | float) -> None:
    chosen = choose_delta("auto", "cuda", torch.bfloat16, 16)
    if chosen.name != "fla":
        pytest.skip(chosen.reason)
    assert_as_exact_as_cpu({"delta_backend": "fla"}, model="qwen3.5-tiny", offload_alpha=alpha)

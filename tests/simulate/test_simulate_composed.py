"""Steps with torch's composed kernels take longer than steps with fused ones, by the bytes of their additional passes.

tests/emulated_gpu/test_composed_passes.py counts the passes themselves."""

from dataclasses import replace
from typing import Any

import pytest
from frameworks import MEGATRON_LM

from memo.config import RunConfig, preset
from memo.estimate.cases import read_case
from memo.estimate.hardware_files import HARDWARE
from memo.search.estimating import answer
from memo.search.launch import run_of
from memo.search.planning import plan
from memo.simulate.kernels import Kernels
from memo.simulate.layer import plain_layer, swapped_layer
from memo.simulate.outside_layers import loss_cost
from memo.simulate.predict import predict_step

H100 = HARDWARE["h100-80"]
TOKENS = 65536
KERNELS = Kernels(replace(H100, efficiency=replace(H100.efficiency, kernel_s=0.0)), "bf16")
PASS_S = KERNELS.memory_s(TOKENS * 2)
"""Seconds of a pass over one number of each token in bf16."""


def run(model: str, kernels: str, **values: Any) -> RunConfig:
    common = {"seq_length": TOKENS, "device": "cuda", "offload_alpha": "off", "kernels": kernels}
    return RunConfig(model=preset(model)).override({**common, **values})


def more_s(model: str, **values: Any) -> tuple[float, float]:
    """Return the additional seconds of forward and backward of a layer with torch's kernels."""
    torch, fused = (plain_layer(run(model, kernels, **values), KERNELS) for kernels in ("torch", "triton"))
    assert (torch.forward.matmul, torch.forward.attention) == (fused.forward.matmul, fused.forward.attention)
    pairs = ((torch.forward, fused.forward), (torch.backward, fused.backward))
    forward_s, backward_s = (composed.elementwise - other.elementwise for composed, other in pairs)
    return forward_s, backward_s


def test_a_layer_of_gpt_adds_up_and_norms_in_two_kernels() -> None:
    """GELU is one kernel: without RoPE, one pass over the sum."""
    assert more_s("gpt-7b", position_embedding_type="none") == pytest.approx((4096 * PASS_S, 0.0))


def test_a_layer_of_llama_rotates_and_activates_in_many_kernels() -> None:
    """Two passes over the output of SwiGLU and four in backward, which also makes the output again; four over
    queries and keys in either direction."""
    activation, rotated = 14336 * PASS_S, (4096 + 1024) * PASS_S
    forward_s, backward_s = more_s("llama-3.1-8b")
    assert forward_s == pytest.approx(2 * activation + 4 * rotated + 4096 * PASS_S)
    assert backward_s == pytest.approx((2 + 4) * activation + 4 * rotated)


def test_norms_of_gemma_are_cast_in_kernels_of_their_own() -> None:
    """Eight passes more, and nine in backward, which runs norms forward again; those of queries and keys twice, because
    a slot keeps what was before them."""
    model = preset("gemma-3-27b")
    models = (model, replace(model, apply_layernorm_1p=False))
    wide, narrow = (plain_layer(replace(run("gemma-3-27b", "torch"), model=each), KERNELS) for each in models)
    hidden, heads = 4 * model.hidden_size, (model.num_attention_heads + model.kv_heads) * model.head_dim
    assert wide.forward.elementwise - narrow.forward.elementwise == pytest.approx(8 * (hidden + heads) * PASS_S)
    backward = 17 * hidden + 25 * heads
    assert wide.backward.elementwise - narrow.backward.elementwise == pytest.approx(backward * PASS_S)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "gpt-oss-20b"])
def test_what_a_plan_recomputes_is_composed_too(model: str) -> None:
    """Moving nothing but what always moves, each activation is made again in backward."""
    torch, fused = (
        swapped_layer(run(model, kernels, offload_alpha=0.0, offload_tiles=8), KERNELS)
        for kernels in ("torch", "triton")
    )
    again = [sum(cost.elementwise for cost in layer.recompute.values()) for layer in (torch, fused)]
    assert again[0] > again[1] and torch.backward.elementwise > fused.backward.elementwise


@pytest.mark.parametrize(("dtype", "passes"), [("bf16", (9, 1)), ("fp32", (5, 0))])
def test_the_loss_passes_over_its_logits(dtype: str, passes: tuple[int, int]) -> None:
    """In bf16 it widens them and narrows their gradient; in fp32 it does neither."""
    kernels = replace(KERNELS, dtype=dtype)
    torch, fused = (loss_cost(run("llama-3.1-8b", name), kernels, again=True) for name in ("torch", "triton"))
    logits_s = kernels.memory_s(TOKENS * 128256 * kernels.narrow)
    assert torch.forward.elementwise - fused.forward.elementwise == pytest.approx(passes[0] * logits_s)
    assert torch.backward.elementwise - fused.backward.elementwise == pytest.approx(passes[1] * logits_s)


def test_other_frameworks_fuse_whatever_a_run_says() -> None:
    steps = [
        predict_step(run("llama-3.1-8b", kernels, tp=8, gbs=8), 8, H100, framework=MEGATRON_LM).step_time_s
        for kernels in ("torch", "triton")
    ]
    assert steps[0] == steps[1]


def test_plans_and_estimates_are_asked_about_fused_kernels() -> None:
    """A plan's run then has them."""
    plans = [
        plan("llama-3.1-8b", 8, hardware="h100-80", seq_len=TOKENS, global_batch_size=8, kernels=kernels, top=1)
        for kernels in ("torch", "triton")
    ]
    asked = {"model": "llama-3.1-8b", "seq_len": str(TOKENS), "tp": "8", "hardware": "h100-80"}
    answers = [answer(read_case({**asked, "kernels": name}, "a test"), is_timed=True) for name in ("", "triton")]
    steps = [found.best.step for found in plans if found.best is not None], [each.step for each in answers]
    for torch, fused in steps:
        assert torch is not None and fused is not None and fused.step_time_s < torch.step_time_s
    assert plans[1].best is not None and run_of(plans[1].question, plans[1].best).hardware.kernels == "triton"

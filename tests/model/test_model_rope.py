"""RoPE frequencies are transformers' own, and angles stay right at a million tokens."""

import functools
from dataclasses import replace
from typing import Any

import mpmath  # type: ignore[import-untyped]  # comes with torch, which needs sympy
import pytest
import torch

from memo.config import preset
from memo.config.model import ModelConfig
from memo.config.to_hugging_face import write_config
from memo.model.heads import Heads
from memo.model.parts import ModelParts
from memo.model.rope import rope_frequencies, rope_table
from memo_kernels.rope.reference import rotate

torch.set_num_threads(1)

MILLION = 10**6
HEADS = ModelConfig(hidden_size=256, num_attention_heads=2, rotary_base=10000.0)  # heads of 128 channels
YARN = replace(HEADS, rotary_base=1e6, rope_scaling_type="yarn", rope_original_max_position_embeddings=32768)
CASES: dict[str, ModelConfig] = {
    "none": HEADS,
    "none-qwen3-base": replace(HEADS, rotary_base=1e6, kv_channels=64),
    "linear": replace(HEADS, rope_scaling_type="linear", rope_scaling_factor=8.0),
    "llama3-8b": preset("llama-3.1-8b"),
    "llama3-other-bands": replace(
        preset("llama-3.1-8b"), rope_scaling_factor=32.0, rope_low_freq_factor=2.0, rope_high_freq_factor=8.0
    ),
    "yarn": replace(YARN, rope_scaling_factor=4.0),
    "yarn-other-betas": replace(YARN, rope_scaling_factor=32.0, rope_beta_fast=16.0, rope_beta_slow=2.0),
    "yarn-no-stretch": replace(YARN, rope_scaling_factor=1.0),
}


def their_rotary(model: ModelConfig) -> Any:
    """The rotary module of a Hugging Face Llama of the same shape."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    kind = model.rope_scaling_type
    scaling: dict[str, Any] = {"rope_type": kind, "factor": model.rope_scaling_factor}
    if kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = model.rope_original_max_position_embeddings
    if kind == "llama3":
        scaling |= {"low_freq_factor": model.rope_low_freq_factor}
        scaling |= {"high_freq_factor": model.rope_high_freq_factor}
    if kind == "yarn":
        scaling |= {"beta_fast": model.rope_beta_fast, "beta_slow": model.rope_beta_slow}
    stretched = int(model.rope_original_max_position_embeddings * model.rope_scaling_factor)
    config = transformers.LlamaConfig(
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        head_dim=model.head_dim,
        max_position_embeddings=max(stretched, 1 + model.rope_original_max_position_embeddings),
        rope_theta=model.rotary_base,
        rope_scaling=None if kind == "none" else scaling,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_transformers(name: str) -> None:
    """Frequencies to 1e-6 relative, as theirs are computed in fp32; the factor on cos and sin to 1e-15."""
    theirs = their_rotary(CASES[name])
    frequencies, scale = rope_frequencies(CASES[name])
    assert frequencies.dtype == torch.float64
    torch.testing.assert_close(frequencies, theirs.inv_freq.double(), rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-15)


@pytest.mark.parametrize(("seq_length", "is_long"), [(4096, False), (4097, True)])
def test_factors_of_longrope_are_those_of_the_length(seq_length: int, is_long: bool) -> None:
    """As transformers chooses for a sequence that is not packed with others; bounds as above."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding

    model = preset("phi-4-mini")
    theirs = Phi3RotaryEmbedding(transformers.AutoConfig.for_model(**write_config(model, 131072, None).file))
    theirs(torch.zeros(1), torch.arange(seq_length).unsqueeze(0))
    frequencies, scale = rope_frequencies(model, seq_length)
    torch.testing.assert_close(frequencies, theirs.inv_freq.double(), rtol=1e-6, atol=0.0)
    assert scale == pytest.approx(theirs.attention_scaling, rel=1e-15)
    plain = rope_frequencies(replace(model, rope_scaling_type="none"))[0]
    assert (plain / frequencies)[-1].item() == pytest.approx(47.77 if is_long else 1.0)


def test_stretching_takes_effect() -> None:
    """Fast pairs stay, slow pairs are divided by the factor: otherwise the comparison above shows nothing."""
    for name in ("llama3-8b", "yarn"):
        model = CASES[name]
        plain = rope_frequencies(replace(model, rope_scaling_type="none"))[0]
        ratio = plain / rope_frequencies(model)[0]
        assert ratio[0].item() == pytest.approx(1.0)
        assert ratio[-1].item() == pytest.approx(model.rope_scaling_factor)
        assert ((ratio > 1.01) & (ratio < model.rope_scaling_factor - 0.01)).any()


@functools.cache
def exact_table(position: int) -> torch.Tensor:
    """cos and sin [2, d/2] of HEADS from 40-digit arithmetic."""
    with mpmath.workdps(40):
        angles = [
            position * mpmath.power(HEADS.rotary_base, mpmath.mpf(-2 * i) / HEADS.head_dim)
            for i in range(HEADS.head_dim // 2)
        ]
        values = [[float(function(angle)) for angle in angles] for function in (mpmath.cos, mpmath.sin)]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("position", [0, 1, 131_071, MILLION, 2**22 - 1])
def test_angles_are_exact_far_out(position: int) -> None:
    """1e-9 in fp64 (the ulp of 4e6 radians is 5e-10); in fp32 and bf16 half an ulp of 1 more."""
    positions = torch.tensor([[position]])
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        table = rope_table(HEADS, positions, dtype)
        assert table.cos.shape == table.sin.shape == (1, 1, 1, HEADS.head_dim // 2)
        assert table.cos.dtype == table.sin.dtype == dtype
        got = torch.stack((table.cos, table.sin)).double().flatten(1)
        rounding = 0.0 if dtype == torch.float64 else torch.finfo(dtype).eps / 2
        assert (got - exact_table(position)).abs().max().item() <= rounding + 1e-9


def test_scores_depend_on_distance_alone() -> None:
    """fp64, 1e-9: q at m + t and k at n + t meet alike for t = 0 and t = 10^6."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 3, HEADS.head_dim, generator=generator, dtype=torch.float64)
    scores = []
    for shift in (0, MILLION):
        rows = [rope_table(HEADS, torch.tensor([[at + shift]]), torch.float64) for at in (1000, 7)]
        scores.append((rotate(q, rows[0].cos, rows[0].sin) * rotate(k, rows[1].cos, rows[1].sin)).sum(-1))
    assert (scores[0] - scores[1]).abs().max().item() < 1e-9 * q.norm().item() * k.norm().item()
    assert (scores[0] - (q * k).sum(-1)).abs().max().item() > 1.0, "nothing was rotated"


@pytest.mark.parametrize("percent", [0.5, 0.25])
def test_a_part_of_a_head_turns_as_a_head_of_its_size(percent: float) -> None:
    """As apply_rotary_pos_emb of GLM's models has it: the first channels turn, the others pass, to the last bit."""
    model = replace(HEADS, rotary_percent=percent)
    small = replace(HEADS, kv_channels=model.rotary_dim)
    positions = torch.arange(5).unsqueeze(1)
    tables = [rope_table(config, positions, torch.float64) for config in (model, small)]
    assert torch.equal(tables[0].cos, tables[1].cos) and torch.equal(tables[0].sin, tables[1].sin)
    heads = Heads(ModelParts(model, torch.float64, None, lambda layer: lambda *args: args[0]), 0)
    qkv = torch.randn(5, 1, 3 * 2 * 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    q, k, v = heads.normed_heads(qkv)
    turned = heads.prepare(qkv, tables[0])
    for x, found in ((q, turned[0]), (k, turned[1])):
        assert torch.equal(
            found[..., : model.rotary_dim], rotate(x[..., : model.rotary_dim], tables[1].cos, tables[1].sin)
        )
        assert torch.equal(found[..., model.rotary_dim :], x[..., model.rotary_dim :])
    assert torch.equal(turned[2], v)
    in_place = qkv.clone()
    q, k, _ = heads.normed_heads(in_place)
    heads.rotate_(q, k, tables[0])
    assert torch.equal(q, turned[0]) and torch.equal(k, turned[1])
    heads.rotate_(q, k, tables[0], back=True)
    torch.testing.assert_close(in_place, qkv, atol=1e-14, rtol=0)

"""Angles of RoPE stay right at a million tokens, and factors of LongRoPE are those of the length.

tests/config/test_config_hugging_face_keys.py compares the frequencies of other scalings with transformers' own.
"""

import functools
from dataclasses import replace

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


@pytest.mark.parametrize(("seq_length", "is_long"), [(4096, False), (4097, True)])
def test_factors_of_longrope_are_those_of_the_length(seq_length: int, is_long: bool) -> None:
    """As transformers chooses for a sequence that is not packed with others; 1e-6 relative, as theirs are in fp32."""
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

"""The table of skeletal activations against the paper's sums, and against what a rank holds."""

import dataclasses
from fractions import Fraction

import pytest

from memo.config import preset
from memo.spec.skeleton import SlotDims, bytes_of, layer_bytes, moves_in_part, skeletal_tensors


@pytest.mark.parametrize("name", ["gpt-tiny", "gpt2-tiny", "gpt-7b", "gpt-13b", "gpt-30b", "gpt-65b"])
def test_gpt_tensors_sum_to_the_papers_sixteen_units(name: str) -> None:
    """Input 1, norm 1, qkv 3, attention 1, residual 1, norm 1, fc1 4, activation 4; the paper leaves lse out."""
    model = preset(name)
    units = {t.name: Fraction(t.width, model.hidden_size) for t in skeletal_tensors(model) if t.name != "lse"}
    assert list(units.values()) == [1, 1, 3, 1, 1, 1, 4, 4]
    assert sum(units.values()) == 16


def test_kinds_and_groups_are_what_the_executor_relies_on() -> None:
    table = {tensor.name: (tensor.kind, tensor.group, tensor.layout) for tensor in skeletal_tensors(preset("gpt-tiny"))}
    assert table == {
        "input": ("always", "", "tokens"),
        "attention_norm": ("never", "norm", "tokens"),
        "qkv": ("token_wise", "qkv", "heads"),
        "attention_out": ("always", "", "heads"),
        "lse": ("always", "", "heads"),
        "residual": ("token_wise", "residual", "tokens"),
        "mlp_norm": ("never", "norm", "tokens"),
        "fc1": ("token_wise", "fc1", "heads"),
        "activation": ("never", "activation", "heads"),
    }


def test_norms_around_need_the_outputs_that_they_take() -> None:
    table = {tensor.name: (tensor.kind, tensor.group) for tensor in skeletal_tensors(preset("gemma-3-tiny"))}
    assert table["projected"] == ("token_wise", "projected") and table["mlp_out"] == ("token_wise", "mlp_out")
    assert table["residual"] == ("never", "norm")
    after = {tensor.name for tensor in skeletal_tensors(preset("olmo-3-tiny"))}
    assert table.keys() - after == {"attention_norm", "mlp_norm"} and after < table.keys()


def test_gqa_gated_mlp_and_own_head_size_show_in_the_widths() -> None:
    widths = {tensor.name: tensor.width for tensor in skeletal_tensors(preset("llama-3.1-8b"))}
    assert widths["qkv"] == (32 + 2 * 8) * 128
    assert widths["attention_out"] == 32 * 128
    assert widths["lse"] == 32
    assert (widths["fc1"], widths["activation"]) == (2 * 14336, 14336)
    model = dataclasses.replace(preset("gpt-tiny"), kv_channels=64)  # 4 heads of 64 beside h = 128
    widths = {tensor.name: tensor.width for tensor in skeletal_tensors(model)}
    assert (widths["input"], widths["qkv"], widths["attention_out"]) == (128, 3 * 256, 256)


def test_log_sum_exp_is_wider_than_a_narrow_model() -> None:
    lse = next(tensor for tensor in skeletal_tensors(preset("gpt-7b")) if tensor.name == "lse")
    assert [bytes_of(lse, SlotDims(1, 1, 1, 1, dtype)) for dtype in ("bf16", "fp32", "fp64")] == [
        32 * 4,
        32 * 4,
        32 * 8,
    ]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
@pytest.mark.parametrize("name", ["gpt-7b", "llama-3.1-8b", "qwen3-8b"])
def test_tp_splits_every_tensor_evenly(name: str, tp: int) -> None:
    for tensor in skeletal_tensors(preset(name)):
        whole = bytes_of(tensor, SlotDims(4096, 1, 1, 1, "bf16"))
        assert bytes_of(tensor, SlotDims(4096, 1, tp, 1, "bf16")) * tp == whole


def test_policies_differ_in_what_is_never_moved() -> None:
    """Of 16 units auto leaves 6 (norms and activation); the paper moves a share of 14, all but input and output."""
    model, tokens = preset("gpt-7b"), 8192
    unit = tokens * model.hidden_size * 2
    auto = layer_bytes(model, SlotDims(tokens, 1, 1, 1, "bf16"), "auto")
    assert auto.groups == {"qkv": 3 * unit, "residual": unit, "fc1": 4 * unit}
    assert auto.never == {"attention_norm": unit, "mlp_norm": unit, "activation": 4 * unit}
    paper = layer_bytes(model, SlotDims(tokens, 1, 1, 1, "bf16"), "paper")
    assert paper.groups == {
        "norm": 2 * unit,
        "qkv": 3 * unit,
        "residual": unit,
        "fc1": 4 * unit,
        "activation": 4 * unit,
    }
    assert paper.never == {}
    assert auto.always == paper.always == {"input": unit, "attention_out": unit, "lse": tokens * 32 * 4}
    always = [tensor for tensor in skeletal_tensors(model) if tensor.kind == "always"]
    assert not any(moves_in_part(tensor, policy) for tensor in always for policy in ("auto", "paper"))

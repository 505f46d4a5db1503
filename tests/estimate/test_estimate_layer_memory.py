"""Memory of layers: sums with known terms, a real layer's own tensors, and measured resident sets of runs on CPUs."""

from typing import Any

import pytest
import torch
from schedules import simulate
from torch import Tensor

from memo.attention.select import select_backend
from memo.config import RunConfig, preset
from memo.config.model import ModelConfig
from memo.estimate.memory_account import memory_account
from memo.estimate.rank_memory import layer_activation_bytes
from memo.model.layer import TransformerLayer
from memo.model.parts import LayerContext, ModelParts
from memo.model.rope import RopeTable, rope_table
from memo.parallel.context import ContextAttention
from memo.parallel.dtypes import torch_dtype
from memo.planner.swap_problem import activation_limits
from memo.spec.layer_ops import layers_in_flight
from memo.spec.schedule import Pipeline, one_f_one_b
from memo.units import GIB, MIB


def run(name: str, **values: object) -> RunConfig:
    return RunConfig(model=preset(name)).override({"device": "cpu", "vocab_size": 1024, **values})


def plain(layer: Any, x: Tensor, rope: RopeTable | None) -> Tensor:
    """A layer with norms before attention and MLP, under autograd."""
    attention, mlp = layer.attention, layer.mlp
    attended = attention.attend(attention.qkv(layer.attention_norm(x)), LayerContext(rope, None))
    x, normed = layer.mlp_norm.of_sum(x, attention.projection(attended))
    return x + mlp.fc2(mlp.activate(mlp.fc1(normed)))


def saved_bytes(config: RunConfig) -> int:
    """Storage that autograd keeps for the backward of one real layer; weights and RoPE's table left out."""
    model, length, dtype = config.model, config.data.seq_length, torch_dtype(str(config.training.params_dtype))
    scale = model.head_dim**-0.5
    attention = ContextAttention(select_backend("cpu", "cpu"), length, "p2p", None, None, scale=scale)
    layer = TransformerLayer(ModelParts(model, dtype, None, lambda _: attention), 0)
    layer.to_empty(device="cpu")
    table = rope_table(model, torch.arange(length).unsqueeze(1), dtype)
    rope = None if model.position_embedding_type == "learned_absolute" else table
    known = {tensor.untyped_storage().data_ptr() for tensor in (*layer.parameters(), table.cos, table.sin)}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        # Norms also keep one or two statistics a token, which the estimate leaves out.
        if address not in known and tensor.numel() > 2 * length:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        plain(layer, torch.zeros(length, 1, model.hidden_size, dtype=dtype, requires_grad=True), rope)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("name", ["gpt-tiny", "gpt2-tiny", "llama-tiny", "qwen3-tiny"])
def test_layer_activations_are_what_a_layer_keeps(name: str, dtype: str) -> None:
    torch.set_num_threads(1)
    config = run(name, seq_length=256, params_dtype=dtype)
    composed = 0 if config.model.normalization == "LayerNorm" else 256 * composed_norm_bytes(config.model, dtype)
    assert layer_activation_bytes(config) + composed == pytest.approx(saved_bytes(config), rel=0.02)


def composed_norm_bytes(model: ModelConfig, dtype: str) -> int:
    """Bytes a token that RMSNorm keeps on a CPU beyond its input and output, as torch composes it there.

    It keeps the normalized input; of a narrow input also a wide copy, instead of the input itself, which stays only
    where others need it (q and k, as parts of the fused qkv).
    """
    narrow = torch_dtype(dtype).itemsize
    wide, hidden = max(4, narrow), 2 * model.hidden_size
    heads = (model.num_attention_heads + model.kv_heads) * model.head_dim if model.qk_layernorm else 0
    if narrow == wide:
        return wide * (hidden + heads)
    return 2 * wide * (hidden + heads) - narrow * hidden


def test_the_papers_sixteen_units() -> None:
    """MEMO, section 3: 128 GiB a layer at 7B and 2^20 tokens in bf16; rotated q, k and the log-sum-exp come on top."""
    config, tokens = run("gpt-7b", seq_length=1 << 20, params_dtype="bf16"), 1 << 20
    rotated, lse = tokens * 2 * 4096 * 2, tokens * 32 * 4
    assert layer_activation_bytes(config) == 128 * GIB + rotated + lse


SCHEDULES = [
    (stages, chunks, microbatches)
    for stages in (1, 2, 3, 4)
    for chunks in (1, 2, 3)
    for microbatches in (1, 2, 4, 12)
    if chunks == 1 or (stages > 1 and microbatches % stages == 0)
]


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), SCHEDULES)
def test_layers_in_flight_follow_the_schedule(stages: int, chunks: int, microbatches: int) -> None:
    pipeline = Pipeline(stages, chunks, microbatches)
    peaks = simulate(pipeline, [one_f_one_b(pipeline, stage) for stage in range(stages)])
    layers = 5 * stages * chunks
    assert [layers_in_flight(pipeline, layers, stage) for stage in range(stages)] == [5 * peak for peak in peaks]


def test_activations_are_split_by_tp_and_cp() -> None:
    config = run("gpt-tiny", seq_length=65536)
    alone = layer_activation_bytes(config)
    assert layer_activation_bytes(config.override({"tp": 2})) == alone // 2
    assert layer_activation_bytes(config.override({"cp": 2, "tp": 4})) == alone // 8
    assert layer_activation_bytes(config.override({"mbs": 3})) == 3 * alone


def test_a_large_vocabulary_is_held_by_the_last_stage() -> None:
    config = run("gpt-tiny", vocab_size=1 << 20, pp=2, params_dtype="fp32", offload_alpha="off")
    first, last = (memory_account(config, 2, stage).transient for stage in (0, 1))
    logits = 1024 * (1 << 20) * 4
    assert logits <= last <= 2.5 * logits
    assert first < last / 9


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_stays_is_judged_by_the_same_account_as_what_moves(device: str) -> None:
    config = run("llama-tiny", device=device, seq_length=4096, pp=2, gbs=8, params_dtype="bf16", offload_alpha="auto")
    found = activation_limits(config, 2, 0, GIB, 2 * GIB)
    plain, swapped = memory_account(config, 2, 0), memory_account(config, 2, 0, moved={})
    beside = GIB - found.device_bytes
    assert beside == swapped.allocated - swapped.states - swapped.rounding_buffers > 0
    assert found.resident_bytes is not None and beside + found.resident_bytes == plain.allocated - plain.states
    assert memory_account(config, 2, 0, moved={"qkv": 4}).host > swapped.host > 0


def test_the_account_covers_measured_resident_sets() -> None:
    """Peaks of the trainer after two steps on CPU (torch 2.13), in MiB."""
    wide = {"num_layers": 8, "hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 32000}
    measured: list[tuple[int, str, dict[str, object]]] = [
        (858, "gpt-tiny", {"seq_length": 16384, "params_dtype": "fp32"}),
        (649, "gpt-tiny", {"seq_length": 8192, "params_dtype": "fp32"}),
        (550, "llama-tiny", {"seq_length": 8192, "params_dtype": "bf16"}),
        (2839, "gpt-tiny", {"seq_length": 256, "params_dtype": "fp32", **wide}),
    ]
    for peak_mib, name, values in measured:
        config = run(name, **{"vocab_size": 257, "offload_alpha": "off", **values})
        ratio = memory_account(config, 1, 0).total / (peak_mib * MIB)
        assert 0.995 <= ratio <= 1.2, (name, values, ratio)

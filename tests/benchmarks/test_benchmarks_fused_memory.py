"""Megatron-LM on fused kernels: its bytes by hand. test_benchmarks_held_out.py has them beside measured ones."""

from dataclasses import replace

import pytest
from fused_memory import fused_allocated_bytes

from memo.config import RunConfig, preset
from memo.errors import ConfigError
from memo.spec.shapes import shape_of

MODEL = replace(preset("llama-tiny"), num_layers=2, vocab_size=512)
VALUES = {"seq_length": 4096, "mbs": 1, "gbs": 1, "device": "cuda", "offload_alpha": "off"}


def test_the_bytes_of_one_gpu_by_hand() -> None:
    config, shape = RunConfig(model=MODEL).override(VALUES), shape_of(MODEL, "", 4096)
    tokens, h, kv, ffn = 4096, MODEL.hidden_size, MODEL.kv_heads * MODEL.head_dim, MODEL.ffn_size
    # In bf16 the inputs of both norms and their outputs, qkv, rotated q and k, the output of attention, that of fc1 and
    # the product; and a number in fp32 for each head.
    layer = 2 * tokens * (4 * h + (h + 2 * kv) + (h + kv) + h + 3 * ffn) + 4 * tokens * MODEL.num_attention_heads
    unread = 2 * (shape.layer_split + shape.layer_replicated)
    loss = 2 * tokens * MODEL.vocabulary + 2 * MODEL.vocabulary * h
    working = max(layer + 2 * 2 * tokens * h, loss)
    counted = 18 * shape.parameters + unread + 2 * layer + 4 * 2 * tokens * h + working
    assert fused_allocated_bytes(config, shape, 1) == pytest.approx(counted, rel=1e-3)  # padding of buckets


def of_two_stages(vocabulary: int, sequences: int) -> int:
    model = replace(MODEL, vocab_size=vocabulary)
    config = RunConfig(model=model).override({**VALUES, "pp": 2, "gbs": sequences})
    return fused_allocated_bytes(config, shape_of(model, "", 4096), 2)


def test_of_several_stages_it_is_the_one_that_needs_most() -> None:
    """The first one, which has two microbatches in flight; with a large vocabulary the last one, which has logits."""
    assert of_two_stages(512, 4) == of_two_stages(512, 2) > of_two_stages(512, 1)
    large = 1 << 17
    assert of_two_stages(large, 4) == of_two_stages(large, 1) > 2 * 4096 * large + 18 * large * MODEL.hidden_size


def test_what_is_not_counted_is_refused() -> None:
    config = RunConfig(model=MODEL).override({**VALUES, "recompute_granularity": "full"})
    with pytest.raises(
        ConfigError, match=r"without recomputation and swapping, not for .*--recompute-granularity full"
    ):
        fused_allocated_bytes(config, shape_of(MODEL, "", 4096), 1)

"""Bytes that attention's backward takes beside its results, by the shapes that the kernels' sources name."""

import pytest

from memo.config.attention_kernels import backend_by_capability
from memo.spec.attention_workspace import AttentionCall, backward_workspace
from memo.units import GIB

LONG = AttentionCall(batch=1, queries=2**18, keys=2**18, heads=16, kv_heads=4, head_dim=128, element_bytes=2)
"""A rank of tp 2 cp 4 of llama-3.1-8b at 1M tokens."""
ODD = AttentionCall(batch=2, queries=100, keys=300, heads=4, kv_heads=2, head_dim=40, element_bytes=2)


def total(backend: str, call: AttentionCall) -> int:
    return sum(backward_workspace(backend, call).values())


@pytest.mark.parametrize("backend", ["cudnn", "te", "flash", "flash_attn"])
def test_a_long_call_takes_gibs(backend: str) -> None:
    """2 GiB of fp32 dq, 16 MiB of sums, and 1 GiB each of dk and dv of all query heads."""
    assert total(backend, LONG) == 2 * GIB + 16 * 2**20 + 2 * GIB
    assert total(backend, LONG._replace(kv_heads=16)) == 2 * GIB + 16 * 2**20


@pytest.mark.parametrize("backend", ["flash_attn_3", "flash_attn_4"])
def test_newer_kernels_sum_for_each_shared_head(backend: str) -> None:
    """Two sums a row; dk and dv in fp32, of 4 heads."""
    assert total(backend, LONG) == 2 * GIB + 2 * 16 * 2**20 + GIB
    assert total(backend, LONG._replace(kv_heads=16)) == 2 * GIB + 2 * 16 * 2**20


def test_rows_and_head_dims_are_those_that_kernels_round_to() -> None:
    rows = 2 * 4
    shared = 2 * 2 * 4 * 300 * 40 * 2
    assert total("cudnn", ODD) == rows * 100 * (40 + 1) * 4 + shared
    assert total("flash", ODD) == rows * 128 * (64 + 1) * 4 + shared
    assert total("flash_attn_3", ODD) == rows * 128 * (64 + 2) * 4 + 2 * 2 * 2 * 384 * 64 * 4
    assert total("flash_attn_4", ODD) == rows * 128 * (64 + 2) * 4 + 2 * 2 * 2 * 384 * 64 * 4
    wide = ODD._replace(head_dim=136, kv_heads=4)
    assert [total(name, wide) for name in ("flash", "flash_attn_3", "flash_attn_4")] == [
        rows * 128 * (192 + 1) * 4,
        rows * 128 * (192 + 2) * 4,
        rows * 128 * (160 + 2) * 4,
    ]


def test_the_rule_without_measured_kernels() -> None:
    assert [backend_by_capability(capability) for capability in (80, 89, 90, 100)] == ["flash"] * 2 + ["cudnn"] * 2

"""Attention kernels by the clock: what counts as usable, where it is kept, and who reads it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import tiny
from torch import Tensor

from memo.artifacts.attention_table import AttentionCase, AttentionRow
from memo.attention import select
from memo.attention.backends import CpuFlash, Saved
from memo.config import RunConfig
from memo.profiler import attention as profiler
from memo.profiler.attention import time_attention
from memo.train import attention
from memo.train.attention import attention_calls, choose_attention, describe_rows, measure_attention
from memo.train.build import build_attention, build_mesh
from memo.train.setup import prepare

torch.set_num_threads(1)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CASES = [
    AttentionCase(16, "bf16", True, False, 64),
    AttentionCase(16, "bf16", True, True, 64),
    AttentionCase(16, "fp64", False, False, 64),
]


class Flawed(CpuFlash):
    """Right in forward, and wrong by a tenth in one gradient."""

    def backward(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = super().backward(*args)
        return dq, dk * 1.1, dv


class Unmasked(CpuFlash):
    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return super().forward(q, k, v, False, scale, out)


class Broken(CpuFlash):
    def backward(self, grad_out: Tensor, saved: Saved, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
        raise AssertionError("no kernel for this head size\nand much more")


def test_every_case_is_measured() -> None:
    rows = time_attention(CASES, 4, 2, 2, CPU)
    assert [row.case for row in rows] == CASES
    assert all(row.seconds.keys() == {"cpu"} and row.seconds["cpu"] > 0 and not row.unusable for row in rows)
    assert all((row.heads, row.kv_heads, row.batch) == (4, 2, 2) for row in rows)


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (Flawed(), "times as far from a dense softmax as may be"),
        (Unmasked(), "times as far from a dense softmax as may be"),
        (Broken(), "no kernel for this head size"),
    ],
)
def test_what_is_wrong_or_raises_has_no_time(backend: CpuFlash, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiler, "select_backend", lambda name, device: backend)
    (row,) = time_attention(CASES[:1], 4, 2, 1, CPU)
    assert not row.seconds and row.unusable["cpu"].endswith(message)
    assert "unusable: " in describe_rows([row])


def config_of(**flags: object) -> RunConfig:
    return tiny(params_dtype="fp32", **flags)


def test_calls_of_a_run_are_those_of_its_ring() -> None:
    base: dict[str, object] = {"seq_length": 4096, "num_attention_heads": 8}
    own = AttentionCase(8, "fp32", True, False, 4096)
    assert attention_calls(config_of(**base), packed=False) == {own: 1.0}
    quarter, square = dataclasses.replace(own, tokens=1024), AttentionCase(8, "fp32", False, False, 1024)
    assert attention_calls(config_of(**base, cp=4), packed=False) == {quarter: 1.0, square: 1.5}
    assert attention_calls(config_of(**base, cp=4, cp_comm_type="a2a"), packed=False) == {own: 1.0}
    half = {dataclasses.replace(own, tokens=2048): 1.0, dataclasses.replace(square, tokens=2048): 0.5}
    mixed = config_of(**base, cp=4, cp_comm_type="a2a+p2p", cp_a2a_size=2)
    assert attention_calls(mixed, packed=False) == half
    assert next(iter(attention_calls(config_of(**base, data_path="corpus", mock_data=False)))).packed
    assert not next(iter(attention_calls(config_of(**base, data_path="corpus", mock_data=False, packing=False)))).packed


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times as a GPU would give them, without one."""

    def timed(
        cases: dict[AttentionCase, float], heads: int, kv_heads: int, batch: int, device: torch.device
    ) -> list[AttentionRow]:
        times = {"cudnn": 0.003, "flash": 0.002}
        return [AttentionRow(case, heads, kv_heads, batch, "2026-01-31T12:00:00+01:00", times, {}) for case in cases]

    monkeypatch.setattr(attention, "time_attention", timed)
    monkeypatch.setattr(attention, "device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))


def test_heads_that_no_fused_kernel_takes_are_told_and_not_measured(tmp_path: Path, on_gpu: None) -> None:
    config = config_of(profile_cache=str(tmp_path), seq_length=256, window_size=64, layer_types="sliding,full")
    assert len(attention_calls(config)) == 2
    config = config.override({"full_kv_channels": 512})
    assert [case.head_dim for case in attention_calls(config)] == [config.model.head_dim]
    chosen = choose_attention(config, CUDA)
    assert chosen.name == "cudnn" and chosen.reason.endswith("; heads of 512 channels by torch's operations")


def test_auto_reads_what_was_kept(tmp_path: Path, on_gpu: None) -> None:
    config = config_of(profile_cache=str(tmp_path), seq_length=256)
    assert choose_attention(config, CUDA).name == "cudnn"  # by the rule
    rows, path = measure_attention(config, CUDA)
    assert path is not None and path.parent == tmp_path
    assert [row.case.packed for row in rows] == [False, True]
    chosen = choose_attention(config, CUDA)
    assert chosen.name == "flash" and chosen.reason.startswith("measured 2026-01-31")
    assert choose_attention(config.override({"seq_length": 511}), CUDA).name == "flash"  # of the same class
    assert choose_attention(config.override({"seq_length": 512}), CUDA).name == "cudnn"  # of the next
    assert choose_attention(config.override({"attention_backend": "cudnn"}), CUDA).reason == "--attention-backend"
    measure_attention(config.override({"seq_length": 512}), CUDA)
    assert choose_attention(config, CUDA).name == "flash"  # beside the new rows the old ones stay
    assert choose_attention(config.override({"seq_length": 512}), CUDA).name == "flash"


def test_a_table_that_cannot_be_read_is_a_warning_and_replaced(tmp_path: Path, on_gpu: None) -> None:
    config = config_of(profile_cache=str(tmp_path))
    _, path = measure_attention(config, CUDA)
    assert path is not None
    path.write_text("{")
    with pytest.warns(UserWarning, match=r"kept times of attention kernels are not used: .* is not JSON"):
        assert choose_attention(config, CUDA).name == "cudnn"
    with pytest.warns(UserWarning):
        measure_attention(config, CUDA)
    assert choose_attention(config, CUDA).name == "flash"


def test_a_run_goes_on_with_what_was_chosen(tmp_path: Path) -> None:
    config = config_of(profile_cache=str(tmp_path), mock_data=True, num_threads=1, peak_tflops=1.0)
    prepared = prepare(config)
    assert prepared.attention == select.AttentionChoice("cpu", "the one fused kernel of this device")
    assert prepared.config.hardware.attention_backend == "cpu"
    assert build_attention(prepared.config, build_mesh(prepared.config, 0, 1), CPU).backend.name == "cpu"

"""scaled_node.py: the link stands to the core as the node's does to its GPU, copies take the link's time, and what is
foreseen follows from the pieces that were measured."""

import dataclasses
import time
from pathlib import Path

import pytest
import scaled_node as benchmark
import torch
from measure import Case
from scaled_foresight import foresee
from scaled_steps import PacedCopies, PacedStreams, Pieces, Work, pieces, take

from memo.artifacts.layer_profile import LayerProfile, ProfileKey
from memo.executor.streams import Stream

RATE = 1e9


def work_of(way: str, profile: Path, device_bytes: int | None = None) -> Work:
    case = Case(way, "gpt-tiny", 1024, "cpu", benchmark.SHAPE, warmup=1, steps=1)
    return Work(case, RATE, str(profile), device_bytes)


def test_the_link_is_the_nodes_where_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    node = benchmark.NODE
    assert benchmark.link_bytes_per_s(2.0) == 2 * benchmark.link_bytes_per_s(1.0)
    monkeypatch.setattr(benchmark, "DTYPE_BYTES", benchmark.NODE_DTYPE_BYTES)
    rate = benchmark.link_bytes_per_s(node.peak_flops("bf16"), benchmark.NODE_HIDDEN)
    assert rate == pytest.approx(node.offload_gb_per_s * 1e9)


def test_copies_take_the_links_time() -> None:
    source, target = torch.ones(1 << 16), torch.empty(1 << 16)
    streams = PacedStreams(bytes_per_s=source.nbytes / 0.1)
    begin_s = time.perf_counter()
    streams.copy(Stream.OFFLOAD, target, source, "host", "device")
    assert time.perf_counter() - begin_s < 0.1, "the caller does not wait"
    streams.synchronize()
    assert time.perf_counter() - begin_s >= 0.1 and torch.equal(source, target)
    copies = PacedCopies(bytes_per_s=source.nbytes / 0.05)
    begin_s = time.perf_counter()
    back = copies.bring(copies.take(source), source.device)
    assert time.perf_counter() - begin_s >= 0.1 and torch.equal(source, back)


def test_memo_moves_under_the_limit_trains_the_same_and_is_foreseen(tmp_path: Path) -> None:
    """Bytes within 0.5 % of what torch allocated; losses are equal in fp32, all bits."""
    profile = tmp_path / "layer.json"
    found = Pieces(**dataclasses.asdict(pieces(work_of("ideal", profile))))
    assert found.forward_s > found.attention_s > 0 and found.backward_s > 0
    layer = LayerProfile.load(profile)
    assert layer.offload_bytes_per_s == layer.prefetch_bytes_per_s == RATE
    rows = {}
    for way, device_bytes in (("ideal", None), ("memo", 40 << 20), ("layer-input-offload", None)):
        work = work_of(way, profile, device_bytes)
        rows[way] = row = take(work)
        told = foresee(work, benchmark.NODE, found, layer, row["moves"])
        assert told.host_bytes == row["host_bytes"] and told.step_s > 0
        if told.device_peak_bytes is not None:
            assert told.device_peak_bytes == pytest.approx(row["device_peak_bytes"], rel=0.005)
    assert rows["ideal"]["moves"] is None and rows["memo"]["moves"] and rows["memo"]["host_bytes"] > 0
    assert rows["memo"]["loss"] == rows["ideal"]["loss"] == rows["layer-input-offload"]["loss"]


def test_steps_are_foreseen_from_their_pieces(tmp_path: Path) -> None:
    """Without a plan a step is the sum of what it does; under one, copies count as far as they do not hide."""
    found = Pieces(forward_s=1.0, backward_s=2.0, attention_s=0.25, beside_s=0.5)
    layers = benchmark.LAYERS

    def foreseen_s(way: str, rate: float = RATE, moves: dict[str, int] | None = None) -> float:
        work = dataclasses.replace(work_of(way, tmp_path / "layer.json"), bytes_per_s=rate)
        return foresee(work, benchmark.NODE, found, profile, moves).step_s

    profile = _profile()
    assert foreseen_s("ideal") == pytest.approx(3 * layers + 0.5)
    assert foreseen_s("full-recompute") == pytest.approx(4 * layers + 0.5)
    assert foreseen_s("selective-recompute") == pytest.approx(3.25 * layers + 0.5)
    input_bytes = 1024 * benchmark.HIDDEN * benchmark.DTYPE_BYTES
    assert foreseen_s("layer-input-offload", rate=10 * input_bytes) == pytest.approx(4.2 * layers + 0.5)
    nothing = dict.fromkeys(("qkv", "residual", "fc1"), 0)
    assert foreseen_s("memo", 1e15, nothing) == pytest.approx(layers * (1.0 + 2.0 + 0.5 + 0.2 + 0.4) + 0.5)
    assert foreseen_s("memo", 1e15, dict.fromkeys(nothing, 8)) == pytest.approx(layers * 3.0 + 0.5)
    assert foreseen_s("memo", 1e6, dict.fromkeys(nothing, 8)) > layers * 3.0 + 1.0


def _profile() -> LayerProfile:
    key = {field.name: "" if field.type in (str, "str") else 1 for field in dataclasses.fields(ProfileKey)}
    return LayerProfile(
        ProfileKey(**key),
        "2026-01-31T12:00:00+01:00",
        {},
        1.0,
        2.0,
        {"qkv": 0.5, "residual": 0.2, "fc1": 0.4},
        1,
        1,
        0,
        0,
    )

"""scaled_node.py: the link stands to the core as the node's does to its GPU, copies take the link's time, and what is
foreseen follows from the pieces that were measured."""

import dataclasses
import gc
import time
from pathlib import Path
from typing import Any

import pytest
import scaled_node as benchmark
import torch
from measure import Case
from scaled_foresight import foresee
from scaled_link import PacedCopies, PacedStreams
from scaled_pieces import Pieces, piece_turns
from scaled_process import PIECES, Process
from scaled_steps import Work, way_turns

from memo.artifacts.layer_profile import LayerProfile
from memo.errors import HostMemoryError
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
    copies = PacedCopies(source.nbytes / 0.05, host_bytes=source.nbytes)
    begin_s = time.perf_counter()
    back = copies.bring(copies.take(source), source.device)
    assert time.perf_counter() - begin_s >= 0.1 and torch.equal(source, back)
    waiting = copies.take(source)
    with pytest.raises(HostMemoryError, match=f"{2 * source.nbytes} bytes of host memory are needed"):
        copies.take(source)
    del waiting
    assert torch.equal(copies.take(source), source), "memory that is free again is used again"


def test_memo_moves_under_the_limit_trains_the_same_and_is_foreseen(tmp_path: Path) -> None:
    """Bytes within 0.5 % of what torch allocated; losses are equal in fp32, all bits."""
    profile = tmp_path / "layer.json"
    found = _pieces(work_of("ideal", profile))
    assert found.forward_s > found.attention_s > 0 and found.backward_s > 0
    assert found.on_tiles_forward_s > 0 and found.recompute_s.keys() == {"qkv", "residual", "fc1"}
    layer = LayerProfile.load(profile)
    assert layer.offload_bytes_per_s == layer.prefetch_bytes_per_s == RATE
    rows = {}
    ways = (("ideal", None), ("ideal-on-tiles", None), ("memo", 40 << 20), ("layer-input-offload", None))
    for way, device_bytes in ways:
        work = work_of(way, profile, device_bytes)
        rows[way] = row = _one_step(work)
        told = foresee(work, benchmark.NODE, found, row["moves"])
        assert told.host_bytes == row["host_bytes"] and told.step_s > 0
        if told.device_peak_bytes is not None:
            assert told.device_peak_bytes == pytest.approx(row["device_peak_bytes"], rel=0.005)
    assert rows["ideal"]["moves"] is None and rows["memo"]["moves"] and rows["memo"]["host_bytes"] > 0
    assert len({row["loss"] for row in rows.values()}) == 1


def _one_step(work: Work) -> dict[str, Any]:
    """After the models of earlier ways are gone, whose memory would be counted."""
    gc.collect()
    with way_turns(work) as turns:
        assert turns.turn()["step_s"] > 0
        return turns.end()


def _pieces(work: Work) -> Pieces:
    with piece_turns(work) as turns:
        return Pieces.median([Pieces(**turns.turn()) for _ in range(2)])


def test_processes_take_turns(tmp_path: Path) -> None:
    ideal = work_of("ideal", tmp_path / "layer.json")
    with Process(benchmark.of_way(ideal, PIECES)) as pieces, Process(ideal) as process:
        found, foundations = benchmark.take_turns({"ideal": process}, pieces, turns=2)
        assert process.end()["device_peak_bytes"] > 1 << 20
    assert all(turn["step_s"] > 0 for turn in found["ideal"]) and len(found["ideal"]) == 2
    assert foundations.forward_s > 0


@pytest.mark.parametrize(
    ("way", "limits", "mark"),
    [("ideal", {"limit_bytes": 20 << 20}, "oom"), ("full-swap", {"host_bytes": 1 << 20}, "oohm")],
)
def test_a_way_that_does_not_fit_ends_out_of_memory(
    way: str, limits: dict[str, int], mark: str, tmp_path: Path
) -> None:
    work = work_of(way, tmp_path / "layer.json")
    assert benchmark.mark(dataclasses.replace(work, **limits)) == mark


def test_steps_are_foreseen_from_their_pieces(tmp_path: Path) -> None:
    """Without a plan a step is the sum of what it does; under one, copies count as far as they do not hide."""
    found = Pieces(
        forward_s=1.0,
        backward_s=2.0,
        attention_s=0.25,
        beside_s=0.5,
        on_tiles_forward_s=1.0,
        on_tiles_backward_s=2.0,
        recompute_s={"qkv": 0.5, "residual": 0.2, "fc1": 0.4},
    )
    layers = benchmark.LAYERS

    def foreseen_s(way: str, rate: float = RATE, moves: dict[str, int] | None = None) -> float:
        work = dataclasses.replace(work_of(way, tmp_path / "layer.json"), bytes_per_s=rate)
        return foresee(work, benchmark.NODE, found, moves).step_s

    assert foreseen_s("ideal") == pytest.approx(3 * layers + 0.5)
    assert foreseen_s("full-recompute") == pytest.approx(4 * layers + 0.5)
    assert foreseen_s("selective-recompute") == pytest.approx(3.25 * layers + 0.5)
    input_bytes = 1024 * benchmark.HIDDEN * benchmark.DTYPE_BYTES
    assert foreseen_s("layer-input-offload", rate=10 * input_bytes) == pytest.approx(4.2 * layers + 0.5)
    nothing = dict.fromkeys(("qkv", "residual", "fc1"), 0)
    assert foreseen_s("memo", 1e15, nothing) == pytest.approx(layers * (1.0 + 2.0 + 0.5 + 0.2 + 0.4) + 0.5)
    assert foreseen_s("memo", 1e15, dict.fromkeys(nothing, 8)) == pytest.approx(layers * 3.0 + 0.5)
    assert foreseen_s("memo", 1e6, dict.fromkeys(nothing, 8)) > layers * 3.0 + 1.0

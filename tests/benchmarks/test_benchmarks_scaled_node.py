"""scaled_node.py: the link stands to the core as the node's does to its GPU, and copies take the link's time."""

import time

import pytest
import scaled_node as benchmark
import torch
from measure import Case

from memo.executor.streams import Stream


def test_the_link_is_the_nodes_where_all_else_is(monkeypatch: pytest.MonkeyPatch) -> None:
    node = benchmark.NODE
    assert benchmark.link_bytes_per_s(2.0) == 2 * benchmark.link_bytes_per_s(1.0)
    monkeypatch.setattr(benchmark, "HIDDEN", benchmark.NODE_HIDDEN)
    monkeypatch.setattr(benchmark, "DTYPE_BYTES", benchmark.NODE_DTYPE_BYTES)
    assert benchmark.link_bytes_per_s(node.peak_flops("bf16")) == pytest.approx(node.offload_gb_per_s * 1e9)


def test_copies_take_the_links_time() -> None:
    source, target = torch.ones(1 << 16), torch.empty(1 << 16)
    streams = benchmark.PacedStreams(bytes_per_s=source.nbytes / 0.1)
    begin_s = time.perf_counter()
    streams.copy(Stream.OFFLOAD, target, source, "host", "device")
    assert time.perf_counter() - begin_s < 0.1, "the caller does not wait"
    streams.synchronize()
    assert time.perf_counter() - begin_s >= 0.1 and torch.equal(source, target)
    copies = benchmark.PacedCopies(bytes_per_s=source.nbytes / 0.05)
    begin_s = time.perf_counter()
    back = copies.bring(copies.take(source), source.device)
    assert time.perf_counter() - begin_s >= 0.1 and torch.equal(source, back)


def test_memo_moves_under_the_limit_and_trains_the_same() -> None:
    rows = {}
    for way, device_bytes in (("ideal", None), ("memo", 40 << 20)):
        case = Case(way, "gpt-tiny", 1024, "cpu", benchmark.SHAPE, warmup=1, steps=1)
        rows[way] = benchmark.take(case, 1e9, device_bytes)
    assert rows["ideal"]["moves"] is None and rows["memo"]["moves"] and rows["memo"]["host_bytes"] > 0
    assert rows["memo"]["loss"] == rows["ideal"]["loss"]

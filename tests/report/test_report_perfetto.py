"""The Chrome trace: rows by name, one complete event a span, and times in microseconds."""

import json
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from swap_runs import SCHEDULES, stage_ops

from memo.planner.swap import swap_plan
from memo.report.perfetto import write_perfetto
from memo.report.timeline import SwapSpan, tenancies
from memo.simulate.streams import LayerTimes

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from swap_plans import simulate_swaps


def events_of(path: Path) -> list[dict[str, Any]]:
    trace = json.loads(path.read_text())
    assert trace["displayTimeUnit"] == "ms"
    events: list[dict[str, Any]] = trace["traceEvents"]
    return events


def complete(
    name: str, category: str, row: int, times_us: tuple[float, float], args: dict[str, int]
) -> dict[str, object]:
    times = dict(zip(("ts", "dur"), times_us, strict=True))
    return {"ph": "X", "pid": 0, "tid": row, "name": name, "cat": category, **times, "args": args}


def test_rows_have_names_and_an_order(tmp_path: Path) -> None:
    spans = simulate_swaps(swap_plan(stage_ops(1, 1, 1, 4, 0)), LayerTimes(1.0, 2.0, 1.0, 2.0))
    write_perfetto(spans, tmp_path / "trace.json", rank=3)
    events = events_of(tmp_path / "trace.json")
    metadata = [(e["name"], e["tid"], e["args"]) for e in events if e["ph"] == "M"]
    assert metadata[0] == ("process_name", 0, {"name": "rank 3"})
    names = {tid: args["name"] for name, tid, args in metadata if name == "thread_name"}
    assert names == dict(enumerate(["compute", "offload", "prefetch", "slot 0", "slot 1"]))
    assert {tid: args["sort_index"] for name, tid, args in metadata if name == "thread_sort_index"} == {
        tid: tid for tid in names
    }
    assert {event["pid"] for event in events} == {3}


def test_events_by_hand(tmp_path: Path) -> None:
    spans = simulate_swaps(swap_plan(stage_ops(1, 1, 1, 4, 0)), LayerTimes(1.0, 2.0, 3.0, 2.0))
    spans = [SwapSpan(s.row, s.step, s.start_s, s.end_s, 7 if s.row == "offload" else 0) for s in spans]
    write_perfetto(spans, tmp_path / "trace.json")
    events = [event for event in events_of(tmp_path / "trace.json") if event["ph"] == "X"]
    first = {"microbatch": 0, "layer": 0, "slot": 0}
    assert events[0] == complete("F0:0", "compute", 0, (0.0, 1e6), first)
    assert events[1] == complete("0:0", "offload", 1, (1e6, 3e6), {**first, "record": 0, "bytes": 7})
    waits = [event for event in events if event["cat"] == "wait"]
    assert waits[0] == complete("wait F0:2", "wait", 0, (2e6, 2e6), {"microbatch": 0, "layer": 2, "slot": 0})


@pytest.mark.parametrize("name", SCHEDULES)
def test_events_of_a_row_never_overlap_and_none_is_lost(name: str, tmp_path: Path) -> None:
    spans = simulate_swaps(swap_plan(SCHEDULES[name]), LayerTimes(1.0, 2.0, 1.5, 2.5))
    write_perfetto(spans, tmp_path / "trace.json")
    events = [event for event in events_of(tmp_path / "trace.json") if event["ph"] == "X"]
    assert len(events) == len(spans) + len(tenancies(spans))
    for row in {event["tid"] for event in events}:
        own = sorted((e for e in events if e["tid"] == row), key=lambda e: e["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(own))

"""Drawings of swaps: what they show, and that the same one is the same file."""

import re
from pathlib import Path

import pytest
from swap_drawing import draw_swaps
from swap_plans import simulate_swaps
from swap_runs import stage_ops

from memo.planner.swap import swap_plan
from memo.report.timeline import SwapSpan
from memo.simulate.streams import LayerTimes


def spans_of(microbatches: int = 1) -> list[SwapSpan]:
    return simulate_swaps(swap_plan(stage_ops(1, 1, microbatches, 4, 0)), LayerTimes(1.0, 2.0, 3.0, 2.0))


def texts(path: Path) -> list[str]:
    return re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", path.read_text())


def blocks(path: Path) -> int:
    """Bars carry a white edge of 0.4; nothing else in the drawing does."""
    return len(re.findall(r"stroke: #ffffff; stroke-width: 0.4", path.read_text()))


def test_a_drawing_has_a_row_for_each_stream_and_slot_and_a_block_for_each_span(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "swaps.svg"
    draw_swaps(spans_of(), path, title="four layers")
    found = texts(path)
    assert [t for t in found if t in ("compute", "offload", "prefetch", "slot 0", "slot 1")] == [
        *("compute", "offload", "prefetch"),
        *("slot 0", "slot 1"),
    ]
    assert {"F0", "F1", "F2", "F3", "B0", "B1", "B2", "B3", "0", "1", "2", "3", "four layers"} <= set(found)
    # 8 layer operations, forwards 2 and 3 wait; 2 offloads, 2 prefetches; 4 layers in slots, two of them twice.
    assert blocks(path) == 8 + 2 + 4 + 6
    assert any("compute waits" in text for text in found)


def test_microbatches_are_named_where_there_are_several(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_swaps(spans_of(2), tmp_path / "swaps.svg")
    assert {"F0:0", "B1:3", "1:2"} <= set(texts(tmp_path / "swaps.svg"))


def test_narrow_blocks_have_no_label(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_swaps(spans_of(16), tmp_path / "swaps.svg")
    assert not any(re.match(r"[FB]\d", text) for text in texts(tmp_path / "swaps.svg"))


def test_the_same_drawing_is_the_same_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("a.svg", "b.svg"):
        draw_swaps(spans_of(), tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()

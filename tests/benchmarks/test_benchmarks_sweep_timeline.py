"""What a swept layer moves, from its plans alone: when each stream copies what, by hand, and its drawing."""

import re
from itertools import pairwise
from pathlib import Path

import pytest
from swap_drawing import draw_swaps, draw_text, kinds_of
from sweep_timeline import SweepTimes, simulate_sweep

from memo.planner.swap import sweep_plans
from memo.report.perfetto import write_perfetto
from memo.report.timeline import SwapSpan, rows_of
from memo.simulate.streams import LayerTimes
from memo.spec.hidden_ops import stage_hidden_ops
from memo.spec.layer_ops import stage_ops, swept_ops
from memo.spec.schedule import Pipeline

ALONE = Pipeline(1, 1, 1)
LINK = LayerTimes(0.0, 0.0, 0.25, 0.5)
TIMES = SweepTimes(LayerTimes(1.0, 2.0, 0.5, 0.5), LINK, LINK, LINK)


def spans_of(layers: int, times: SweepTimes = TIMES, sections: int = 2, all_moves: bool = False) -> list[SwapSpan]:
    """`all_moves`: one layer recomputes attention, and hidden states are in host memory."""
    ops = swept_ops(stage_ops(ALONE, 0, layers), sections, layers, 1 if all_moves else 0)
    hidden = stage_hidden_ops(ALONE, 0, layers, sections) if all_moves else None
    return simulate_sweep(*sweep_plans(ops, hidden), times, layers)


def row(spans: list[SwapSpan], name: str) -> list[tuple[str, str, float, float]]:
    return [(span.kind, span.label, span.start_s, span.end_s) for span in spans if span.row == name]


def test_two_layers_of_two_sections_by_hand() -> None:
    """Layer 0 leaves section by section, its keys and values beside it; both come back for its backward."""
    spans = spans_of(2)
    assert row(spans, "compute") == [
        ("activations", "F0:0:0", 0.0, 1.0),
        ("activations", "F0:0:1", 1.0, 2.0),
        ("activations", "F0:1:0", 2.0, 3.0),
        ("activations", "F0:1:1", 3.0, 4.0),
        ("activations", "B0:1:1", 4.0, 6.0),
        ("activations", "B0:1:0", 6.0, 8.0),
        ("activations", "B0:0:1", 8.5, 10.5),
        ("activations", "B0:0:0", 10.5, 12.5),
    ]
    assert row(spans, "offload") == [
        ("activations", "0:0:0", 1.0, 1.5),
        ("keys and values", "0:0:0", 1.5, 1.75),
        ("activations", "0:0:1", 2.0, 2.5),
        ("keys and values", "0:0:1", 2.5, 2.75),
    ]
    assert row(spans, "prefetch") == [
        ("keys and values", "0:0:1", 6.0, 6.5),
        ("activations", "0:0:1", 6.5, 7.0),
        ("keys and values", "0:0:0", 8.0, 8.5),
        ("activations", "0:0:0", 8.5, 9.0),
    ]
    assert row(spans, "wait") == [("keys and values", "B0:0:0", 8.0, 8.5)]


@pytest.mark.parametrize("layers", [3, 5])
def test_each_stream_does_one_thing_at_a_time(layers: int) -> None:
    on_disk = LayerTimes(0.0, 0.0, 0.25, 0.5, write_s=0.4, read_s=0.7)
    spans = spans_of(layers, SweepTimes(TIMES.sections, on_disk, on_disk, LINK), 4, all_moves=True)
    assert rows_of(spans) == ["compute", "offload", "prefetch", "write", "read"]
    for name in rows_of(spans):
        assert all(one[3] <= other[2] + 1e-9 for one, other in pairwise(row(spans, name))), name
    written, read = (sorted(each[:2] for each in row(spans, name)) for name in ("write", "read"))
    assert written == read and {kind for kind, _ in written} == {"keys and values", "layer inputs"}
    hidden = [sum(kind == "hidden states" for kind, *_ in row(spans, name)) for name in ("offload", "prefetch")]
    assert hidden[0] == hidden[1] > 4 * layers


def test_a_drawing_names_what_moves_and_has_rows_for_the_disk(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    on_disk = LayerTimes(0.0, 0.0, 0.25, 0.5, write_s=0.4, read_s=0.7)
    spans = spans_of(3, SweepTimes(TIMES.sections, on_disk, LINK, LINK), 4, all_moves=True)
    draw_swaps(spans, tmp_path / "sweep.svg")
    found = set(re.findall(r"<text[^>]*>(?:<tspan[^>]*>)?([^<]*)<", (tmp_path / "sweep.svg").read_text()))
    assert {"compute", "offload", "prefetch", "disk write", "disk read", "slot 0", "forward", "backward"} <= found
    assert {"keys and values", "inputs of layers that recompute attention", "hidden states between layers"} <= found
    assert len(kinds_of(spans)) == 4 and "compute waits" in found and "B2:1" in found
    drawn = draw_text(spans).splitlines()
    assert [line.split()[0] for line in drawn[:5]] == rows_of(spans)


def test_a_trace_has_them_as_well(tmp_path: Path) -> None:
    on_disk = LayerTimes(0.0, 0.0, 0.25, 0.5, write_s=0.4, read_s=0.7)
    write_perfetto(spans_of(2, SweepTimes(TIMES.sections, on_disk)), tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    assert '"keys and values 0:0:1"' in text and '"write"' in text and '"wait keys and values B0:0:0"' in text

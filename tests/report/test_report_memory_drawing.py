"""The drawing of plans by sequence length: no text lies over another one, however long what layers do is to tell."""

from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest

from memo.config.derived import SLOT_TILES
from memo.report.memory_drawing import _PARTS, draw_plans
from memo.search.candidates import FULL, KEEP, Layout, Strategy
from memo.spec.sweep import Sweep
from memo.units import GIB

SWEPT = Strategy("auto", sweep=Sweep(192, SLOT_TILES, 31, hidden_on_host=True))
STATES = Strategy("auto", sweep=Sweep(64, SLOT_TILES, 23), order="breadth_first", sharding="optim_grads_params")


def plan(strategy: Strategy, seq_len: int) -> Any:
    """As much of one as is drawn."""
    parts = {name: 8 * GIB for names in _PARTS.values() for name in names}
    best = SimpleNamespace(
        strategy=strategy,
        layout=Layout(tp=8, cp=64, pp=16, mbs=16),
        step=SimpleNamespace(mfu_percent=45.0),
        sized=SimpleNamespace(memory=SimpleNamespace(**parts), host_bytes=1900 * GIB),
    )
    return SimpleNamespace(
        best=best, question=SimpleNamespace(gpu_memory_gib=80.0, host_memory_gib=2048.0, seq_len=seq_len)
    )


@pytest.mark.parametrize("strategies", [[KEEP], [SWEPT] * 3, [KEEP, FULL, *[SWEPT] * 4, *[STATES] * 5]])
def test_no_text_lies_over_another(strategies: list[Strategy]) -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    plans = [plan(strategy, 8192 << at) for at, strategy in enumerate(strategies)]
    figure = draw_plans(plans, "a test", "gpt-7b on 8 x a800-80, 16 sequences a step: the fastest plan that fits")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    shown = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in shown]
    assert sum("MFU 45 %" in text for text, _ in boxes) == len(strategies)
    over = [(one, other) for (one, box), (other, another) in combinations(boxes, 2) if box.overlaps(another)]
    assert not over
    width, height = canvas.get_width_height()
    labels = [box for text, box in boxes if "MFU" in text]
    assert all(box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height for box in labels)

"""Drawings of memory plans, from the file that `memo solve` writes."""

import re
from pathlib import Path

import pytest

from memo.artifacts.memory_plan import MemoryPlan, PlannedPhase, PlannedRequest
from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace
from memo.cli.main import main
from memo.errors import ArtifactError
from memo.planner.memory.trace_plan import solve_trace
from memo.report.addresses import draw_addresses


def trace() -> Trace:
    forward = (Malloc(0, 1 << 20), Malloc(1, 2 << 20), Free(0), Malloc(2, 1 << 20), Free(2))
    backward = (Malloc(3, 1 << 20), Free(1), Malloc(4, 4 << 20), Free(3), Malloc(5, 1 << 20))  # 4 is freed, 5 not
    return Trace(
        "cpu",
        "recorded",
        (Phase("layer_forward", 0, 0, forward), Phase("layer_backward", 0, 0, (*backward, Free(4)))),
    )


def test_blocks_end_where_the_trace_frees_them() -> None:
    plan = solve_trace(trace()).plan
    ends = [request.end for phase in plan.phases for request in phase.requests]
    assert ends == [2, 4, 3, 5, 6, -1]


def test_solve_then_report_draws_every_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace().save(tmp_path / "trace.json")
    assert main(["solve", "--trace", str(tmp_path / "trace.json"), "--out", str(tmp_path / "plan.json")]) == 0
    assert main(["report", "--memory", str(tmp_path / "plan.json")]) == 0
    assert f"drawn to {tmp_path / 'plan.svg'}" in capsys.readouterr().out
    drawing = (tmp_path / "plan.svg").read_text()
    boxes = [path for path in re.findall(r"<path d=\"([^\"]+)\"", drawing) if path.count("L") == 3]
    assert len(boxes) >= 5  # one a block in the arena, and those of the legend
    for text in ("layer_forward", "layer_backward", "reserved, optimal"):
        assert text in drawing


def test_a_plan_without_ends_cannot_be_drawn(tmp_path: Path) -> None:
    phases = (PlannedPhase("loss", -1, 0, (PlannedRequest(100, 0),)),)
    plan = MemoryPlan("cpu", "flat", 64, 1, 100, 100, "optimal", phases)
    with pytest.raises(ArtifactError, match="does not say when its blocks end"):
        draw_addresses(plan, tmp_path / "plan.svg")

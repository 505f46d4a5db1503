"""`memo estimate` and `memo plan --trace-out`: the simulated step as a Chrome trace."""

import json
from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main

Capture = pytest.CaptureFixture[str]
PLAN = ["plan", "--model", "gpt-7b", "--gpus", "8", "--seq-len", "262144", "--gbs", "16", "--host-memory-gib", "250"]
"""So little host memory that the simulator left to itself would move more, and take 2 % less time."""
ESTIMATE = ["estimate", "--model", "gpt-7b", "--seq-len", "262144", "--tp", "4", "--pp", "2", "--gbs", "4"]


def traced(argv: list[str], trace: Path, capsys: Capture) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What is printed, and the spans of the file; they end when the step is said to (0.5 %, as every prediction)."""
    assert main([*argv, "--json", "--trace-out", str(trace)]) == 0
    found = json.loads(capsys.readouterr().out)
    spans = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    step_s = found["choices"][0]["step_time_s"] if "choices" in found else found["step_time_s"]
    assert max(span["ts"] + span["dur"] for span in spans) / 1e6 == pytest.approx(step_s, rel=0.005)
    return found, spans


def layers(spans: list[dict[str, Any]]) -> int:
    return sum("layer" in span["name"] for span in spans if span["cat"] == "compute")


@pytest.mark.parametrize("alpha", ["off", "0.5", "auto"])
def test_of_one_case(alpha: str, tmp_path: Path, capsys: Capture) -> None:
    """Its stages, its layers, and the copies that its alpha makes."""
    found, spans = traced([*ESTIMATE, "--alpha", alpha], tmp_path / "step.json", capsys)
    assert {span["pid"] for span in spans} == {0, 1}
    assert layers(spans) == 2 * 32 * 4
    copies = sum(span["cat"] in ("offload", "prefetch") for span in spans)
    assert (copies == 0) == (alpha == "off")
    assert (found["moved_tiles"] is not None) == (alpha == "auto")


def test_of_the_best_plan(tmp_path: Path, capsys: Capture) -> None:
    found, spans = traced(PLAN, tmp_path / "step.json", capsys)
    best = found["choices"][0]
    assert {span["pid"] for span in spans} == set(range(best["pp"]))
    microbatches = 16 // best["dp"] // best["mbs"]
    assert layers(spans) == 2 * 32 * microbatches
    assert 0 < sum(best["moved_tiles"].values()) < 3 * 8
    assert sum(span["cat"] == "offload" for span in spans) > 20 * microbatches

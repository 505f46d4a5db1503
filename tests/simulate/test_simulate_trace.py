"""The spans of a simulated step and the file they make."""

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from memo.config import RunConfig, preset
from memo.errors import ArtifactError
from memo.estimate.hardware_files import HARDWARE
from memo.simulate.resources import ROWS
from memo.simulate.trace import SimulatedStep, simulate_step, write_trace


@pytest.fixture(scope="module")
def step() -> SimulatedStep:
    values = {"seq_length": 65536, "tp": 2, "pp": 2, "gbs": 8, "offload_alpha": 0.5, "num_layers": 8, "device": "cuda"}
    return simulate_step(RunConfig(model=preset("gpt-7b")).override(values), 8, HARDWARE["a800-80"])


def test_no_row_does_two_things_at_once(step: SimulatedStep) -> None:
    rows = defaultdict(list)
    for span in step.spans:
        assert span.end_s >= span.start_s
        rows[span.stage, span.row].append((span.start_s, span.end_s))
    for spans in rows.values():
        spans.sort()
        for (_, end_s), (start_s, _) in pairwise(spans):
            assert start_s >= end_s - 1e-9
    assert {row for _, row in rows} == set(ROWS) - {"cpu", "disk"}


def test_every_operation_is_there_once(step: SimulatedStep) -> None:
    """Two stages of four layers, four microbatches each way; the ends of the model where they belong."""
    names = [(span.stage, span.name) for span in step.spans if span.row == "compute"]
    assert len(names) == len(set(names))
    layers = [name for _, name in names if "layer" in name]
    assert len(layers) == 2 * 8 * 4
    assert {stage for stage, name in names if name.startswith("embedding")} == {0}
    assert {stage for stage, name in names if name.startswith("loss")} == {1}
    assert sum(name == "optimizer" for _, name in names) == 2
    reduced = [span for span in step.spans if span.name.startswith("reduce layer")]
    assert len(reduced) == 8
    assert max(span.end_s for span in step.spans) == pytest.approx(step.step_time_s)


def test_forward_on_the_second_stage_follows_the_first(step: SimulatedStep) -> None:
    at = {(span.stage, span.name): span for span in step.spans if span.row == "compute"}
    assert at[1, "F0 layer 4"].start_s > at[0, "F0 layer 3"].end_s
    assert at[0, "B0 layer 3"].start_s > at[1, "B0 layer 4"].end_s


def test_the_file_is_a_chrome_trace(step: SimulatedStep, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    write_trace(step.spans, path)
    events = json.loads(path.read_text())["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(step.spans)
    assert max(event["ts"] + event["dur"] for event in complete) == pytest.approx(step.step_time_s * 1e6)
    threads = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert threads == set(ROWS) - {"cpu", "disk"}
    with pytest.raises(ArtifactError):
        write_trace(step.spans, tmp_path / "step.json" / "below.json")

"""Memory plans: round trip, and one message for files that hold none."""

import json
from pathlib import Path
from typing import Any

import pytest

from memo.artifacts.memory_plan import NATIVE, MemoryPlan, PlannedPhase, PlannedRequest
from memo.errors import ArtifactError

PLAN = MemoryPlan(
    device="cpu",
    planner="paper",
    alignment_bytes=64,
    min_bytes=10,
    arena_bytes=192,
    lower_bound_bytes=128,
    proof="feasible",
    phases=(
        PlannedPhase("layer_forward", 0, 1, (PlannedRequest(100, 0, 2), PlannedRequest(50, 128, 3))),
        PlannedPhase("loss", -1, 1, (PlannedRequest(11, NATIVE),)),
        PlannedPhase("optimizer", -1, -1, ()),
    ),
)


def test_round_trip(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "deep" / "plan.json")
    assert MemoryPlan.load(tmp_path / "deep" / "plan.json") == PLAN


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("phases", 0, "requests", 0), [100], r"phases\[0\].requests\[0\] is a list of 1: give a list of 3"),
        (("arena_bytes",), "192", "arena_bytes is '192'.*solve the trace again"),
        (("proof",), "certain", "proof is 'certain'"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, path: tuple[Any, ...], value: Any, message: str) -> None:
    file = tmp_path / "plan.json"
    PLAN.save(file)
    body = json.loads(file.read_text())
    inner = body
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    file.write_text(json.dumps(body))
    with pytest.raises(ArtifactError, match=message):
        MemoryPlan.load(file)


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"could not be written .*: check the path"):
        PLAN.save(tmp_path / "file" / "plan.json")

"""`memo solve` as users meet it: files in and out, what is printed, exit statuses."""

import csv
from pathlib import Path

import pytest

from memo.artifacts.memory_plan import MemoryPlan
from memo.artifacts.memory_trace import Free, Malloc, Phase, Trace
from memo.cli.main import main
from memo.planner.memory.plan_check import check_memory_plan
from memo.units import MIB

TRACE = Trace(
    "cpu",
    "recorded",
    (
        Phase("layer_forward", 0, 0, (Malloc(1, 4 * MIB), Malloc(2, 2 * MIB), Malloc(3, 9), Free(1))),
        Phase("layer_backward", 0, 0, (Malloc(4, 4 * MIB), Free(2), Free(4), Free(3))),
    ),
)
BLOCKS = "id,lower,upper,size\na,0,2,30\nb,1,4,20\nc,2,4,10\n"


@pytest.fixture
def trace(tmp_path: Path) -> str:
    TRACE.save(tmp_path / "trace.json")
    return str(tmp_path / "trace.json")


@pytest.fixture
def blocks(tmp_path: Path) -> str:
    (tmp_path / "blocks.csv").write_text(BLOCKS)
    return str(tmp_path / "blocks.csv")


@pytest.mark.parametrize("planner", ["paper", "flat", "auto"])
def test_trace_to_plan(trace: str, tmp_path: Path, planner: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    assert main(["solve", "--trace", trace, "--out", str(out), "--planner", planner]) == 0
    plan = MemoryPlan.load(out)
    check_memory_plan(plan, TRACE)
    assert (plan.arena_bytes, plan.proof, plan.min_bytes) == (6 * MIB, "optimal", MIB)
    assert plan.planner == ("flat" if planner == "flat" else "paper")
    printed = capsys.readouterr().out
    assert f"bound    {6 * MIB:,} bytes (6.00 MiB)" in printed
    assert f"peak     {6 * MIB:,} bytes (6.00 MiB)" in printed
    assert "gap      0.00%, optimal" in printed
    assert "seconds  greedy " in printed
    assert ("arenas and what crosses phases" in printed) == (planner != "flat")
    assert "3 requests in 2 phases" in printed


def test_min_bytes(trace: str, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    assert main(["solve", "--trace", trace, "--out", str(out), "--min-bytes", "1"]) == 0
    assert [len(phase.requests) for phase in MemoryPlan.load(out).phases] == [3, 1]


def test_csv_to_offsets(blocks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.csv"
    assert main(["solve", "--csv", blocks, "--out", str(out), "--capacity", "50"]) == 0
    rows = list(csv.DictReader(out.open()))
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert max(int(row["offset"]) + int(row["size"]) for row in rows) == 50
    assert "gap      0.00%, optimal" in capsys.readouterr().out


def test_capacity_that_is_not_met_ends_with_status_3_and_the_best(
    blocks: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.csv"
    assert main(["solve", "--csv", blocks, "--out", str(out), "--capacity", "49"]) == 3
    assert len(out.read_text().splitlines()) == 4
    message = capsys.readouterr().err
    assert message == "--capacity is 49 bytes, the peak 50 and the lower bound 50: no plan fits: give more\n"


def test_capacity_that_may_yet_be_met(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 6 live at once, and a plan with 7 is what the greedy orders find; the MIP is not asked."""
    monkeypatch.setattr("memo.planner.memory.solve._MAX_MIP_PAIRS", 0)
    shapes = ["0,1,3", "0,2,3", "1,3,1", "2,3,1", "1,4,2", "2,4,2", "4,5,1", "3,6,2", "4,6,3", "5,6,1"]
    path = tmp_path / "holed.csv"
    path.write_text("lower,upper,size,id\n" + "".join(f"{shape},{i}\n" for i, shape in enumerate(shapes)))
    arguments = ["--csv", str(path), "--out", str(tmp_path / "out.csv"), "--capacity", "6", "--time-limit", "0.01"]
    assert main(["solve", *arguments]) == 3
    captured = capsys.readouterr()
    assert "the lower bound 6: whether one fits is open: give more time or more bytes" in captured.err
    assert "timed out" in captured.out


def trace_of(length: int, file: Path) -> str:
    events = (Malloc(0, 1024 * length), Malloc(1, 512 * length), Free(0), Free(1))
    phases = (Phase("layer_forward", 0, 0, events),)
    Trace("cpu", "recorded", phases, {"seq_length": length}).save(file)
    return str(file)


def test_three_lengths_foretell_a_fourth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [trace_of(length, tmp_path / f"{length}.json") for length in (1024, 2048, 4096)]
    out = tmp_path / "plan.json"
    assert main(["solve", "--trace", *files, "--seq-length", "1048576", "--out", str(out)]) == 0
    assert MemoryPlan.load(out).arena_bytes == 1536 << 20
    assert "gap      0.00%, optimal" in capsys.readouterr().out

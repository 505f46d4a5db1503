"""Scripts answer --help, the ideal is fitted as said, and BENCHMARKS.md holds what was measured and nothing else."""

import json
import runpy
import sys
from pathlib import Path

import full_size
import pytest
import report
import rows
import run_all
from scales import FULL, SMOKE, parser, resolve
from table3_end_to_end import fit_ideal, ratios

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
SET = [*run_all.SCRIPTS, "run_all", "report", "all_on_gpu", "swap_convergence", "measure", "fsdp2"]


@pytest.mark.parametrize("name", SET)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(BENCHMARKS / f"{name}.py"), run_name="__main__")
    assert ended.value.code == 0
    assert f"{name}.py" in capsys.readouterr().out


def test_full_size_is_refused_without_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        resolve(parser("").parse_args(["--scale", "full"]))
    assert ended.value.code == 2
    assert capsys.readouterr().err == "--scale full needs a CUDA device, and torch finds none: give --scale smoke\n"


def test_scales_name_each_other() -> None:
    args = resolve(parser("").parse_args(["--scale", "smoke", "--minutes", "1"]))
    assert args.scale is SMOKE and 0 < args.left_s <= 60
    assert list(FULL.lengths) == [2**16, 2**17, 2**18, 2**19, 2**20]


def test_the_ideal_is_fitted() -> None:
    lengths = [1000, 2000, 4000]
    exact = [3e-3 * s + 5e-7 * s * s for s in lengths]
    assert fit_ideal(lengths, exact) == pytest.approx((3e-3, 5e-7), rel=1e-9)
    assert fit_ideal(lengths[:1], exact[:1]) is None
    linear = fit_ideal(lengths, [1.0, 1.9, 3.6])  # concave: b would be negative
    assert linear is not None and linear[1] == 0.0 and linear[0] > 0


def test_ratios_are_of_one_length() -> None:
    def row(way: str, seq_length: int, step_s: float | None) -> dict[str, object]:
        status = {"status": "oom"} if step_s is None else {"status": "ok", "step_p50_s": step_s}
        return {"way": way, "seq_length": seq_length, **status}

    lines = [row("none", 100, 1.0), row("none", 200, 2.0), row("none", 400, None)]
    lines += [row("full-recompute", 400, 6.0), row("memo", 400, 5.0), row("memo", 200, 2.5)]
    found = ratios(lines, lines[4])
    assert found["speed_over_full-recompute"] == pytest.approx(1.2)
    assert found["share_of_ideal_speed"] == pytest.approx(0.8)
    assert "extrapolated from [100, 200]" in found["ideal_is"]
    assert ratios(lines, lines[5])["ideal_is"] == "measured"
    assert ratios(lines, lines[2]) == {}


def test_rows_survive_and_stand_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    empty = report.page()
    assert empty.count("Not measured.") == len(report.SECTIONS) and "|---" not in empty
    journal = rows.Journal("full/table4_ablation")
    added = journal.add({"way": "memo", "status": "ok", "seq_length": 512, "step_p50_s": 0.25, "mfu_causal_percent": 3})
    journal.amend(added, **{"speed_over_full-recompute": 1.5})
    journal.add({"way": "none", "status": "oom", "message": "a | b", "seq_length": 512})
    kept = [json.loads(line) for line in (tmp_path / "full" / "table4_ablation.jsonl").read_text().splitlines()]
    assert [line["way"] for line in kept] == ["memo", "none"]
    assert {"command", "commit", "date", "device", "torch", "python"} <= kept[0].keys()
    page = report.page()
    assert "| 512 | memo | ok | 0.250 | 3.0 | 1.50 |" in page
    assert "| 512 | none | oom: a / b | - | - | - |" in page
    assert "MFU full" not in page  # no row knows it
    assert page.count("Not measured.") == len(report.SECTIONS) - 1
    assert (
        "Not measured: Steps beside what was foreseen of them, End to end: one rank, by sequence length, Copies" in page
    )


def test_devices_are_called_emulated_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    row = {"evidence": "on the emulated GPU", "device": "NVIDIA H100", "schedules": 22, "faults": []}
    rows.write("emulated_schedules", [{**row, "flow": "plain"}, {**row, "flow": "swap", "faults": ["a bit"]}])
    line = json.loads((tmp_path / "emulated_schedules.jsonl").read_text().splitlines()[0])
    page = report.page()
    assert f"on an emulated {line['device']}" in page and "| 2 | 44 | 1 |" in page


def test_the_page_is_that_of_the_results() -> None:
    assert report.PAGE.read_text(encoding="utf-8") == report.page(), "run `python benchmarks/report.py`"


def test_the_page_on_memory_has_the_rows_at_full_size() -> None:
    assert full_size.table(rows.read("full_size")) in (ROOT / "docs" / "memory.md").read_text(encoding="utf-8")

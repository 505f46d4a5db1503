"""benchmarks/kernels.py runs every operation on the kernels, and tells times, rates and ratios of what it timed."""

import importlib.util
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE

from memo.attention.delta_kernels import choose_delta

pytest.importorskip("triton", reason="Triton is not installed")
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def _script() -> Any:
    """benchmarks/kernels.py under another name.

    `import kernels` may find the folder kernels/ of the root first: transformers looks for a package of that name, and
    whatever it finds stays loaded.
    """
    sys.path.insert(0, str(BENCHMARKS))  # the script imports its neighbours by name
    spec = importlib.util.spec_from_file_location("benchmark_of_kernels", BENCHMARKS / "kernels.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = _script()


@pytest.mark.parametrize("name", kernels.WORKS)
def test_a_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run is taken for as many seconds as runs came before it; torch.compile is left to a GPU."""
    runs: list[kernels.Run] = []

    def seconds(run: kernels.Run | None) -> float | None:
        if run is None:
            return None
        run()
        runs.append(run)
        return float(len(runs))

    monkeypatch.setattr(kernels, "seconds", seconds)
    monkeypatch.setattr(kernels, "compiled", lambda ops: ops)
    work = kernels.WORKS[name](kernels.Maker(DEVICE.type), kernels.TINY)
    row = kernels.measured(work)
    assert row["status"] == "ok" and "message" not in row
    assert (row["forward_s"], row["forward_gb_per_s"]) == (1.0, work.forward_bytes / 1e9)
    if work.backward_bytes is None:
        assert (row["forward_over_torch"], row["forward_over_compile"]) == (2.0, 3.0)
        assert "backward_s" not in row and "both_over_torch" not in row
    else:
        assert (row["backward_s"], row["backward_gb_per_s"]) == (1.0, work.backward_bytes / 1e9)
        assert (row["forward_over_torch"], row["both_over_torch"]) == (3.0, 2.0)
        assert (row["forward_over_compile"], row["both_over_compile"]) == (5.0, 3.0)


def test_rows_of_gated_delta_nets() -> None:
    """fla's where it can run; without a GPU nothing is timed."""
    journal, scale = Rows(), SimpleNamespace(name="smoke", device=DEVICE.type)
    kernels.add_delta_nets(journal, scale, kernels.TINY)
    by_torch, by_fla = journal.rows
    assert by_torch["status"] == ("ok" if DEVICE.type == "cuda" else "not measured")
    assert (by_fla["status"] == "ok") == (choose_delta("auto", DEVICE.type, torch.bfloat16, 8).name == "fla")
    assert by_fla["op"] == "gated delta net, fla"
    assert "ok" in (by_torch["status"], by_fla["status"]) or by_fla["message"] == "the one rule of this device"


class Rows:
    """In the place of a journal."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)

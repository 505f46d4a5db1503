"""Predictions against the papers' measured tables, through benchmarks/simulator_accuracy.py."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from memo.config.checks import check


@pytest.fixture(scope="module")
def accuracy() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "simulator_accuracy.py"
    spec = importlib.util.spec_from_file_location("simulator_accuracy", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("number", [3, 4])
def test_throughput_of_the_4d_paper(accuracy: ModuleType, number: int) -> None:
    rows = accuracy.p4d(number)
    assert len(rows) == {3: 85, 4: 60}[number]
    assert accuracy.mean_error(rows) <= 0.10


@pytest.mark.parametrize("number", [3, 4])
def test_the_layout_chosen_is_nearly_the_best_measured(accuracy: ModuleType, number: int) -> None:
    """Of the layouts that did not run out of memory, at every number of GPUs."""
    regrets = accuracy.regrets(accuracy.p4d(number))
    assert list(regrets) == {3: [8, 16, 32, 64, 128, 256], 4: [4, 8, 16, 32, 64]}[number]
    assert max(regrets.values()) <= 0.05


def test_mfu_of_memo(accuracy: ModuleType) -> None:
    rows = accuracy.memo_table3()
    assert len(rows) == 9 + 12
    assert accuracy.mean_error(rows) <= 0.05


def test_ablation_of_memo(accuracy: ModuleType) -> None:
    """Full recomputation with planned memory, and full swapping, whose copies hide only from 256K on."""
    rows = accuracy.memo_table4()
    assert accuracy.mean_error(rows) <= 0.05
    swapped = [m for m in rows if m.alpha == 1.0]
    hidden = [m.predicted().hidden_share for m in swapped]
    assert hidden[0] < hidden[1] < 1.0
    assert hidden[2] == pytest.approx(1.0, abs=0.02)


def test_every_row_is_a_run_that_memo_accepts(accuracy: ModuleType) -> None:
    for row in [*accuracy.p4d(3), *accuracy.p4d(4), *accuracy.memo_table3(), *accuracy.memo_table4()]:
        check(row.config, row.gpus, needs_data=False)


def test_tables_tell_good_shares_from_bad_ones(accuracy: ModuleType) -> None:
    """A model that fits whatever it is told would prove nothing: halved shares break every bound."""
    from dataclasses import replace

    from memo.estimate.hardware_table import HARDWARE

    halved = replace(HARDWARE["a800-80"].efficiency, matmul=0.41, attention_forward=0.32, attention_backward=0.25)
    assert accuracy.mean_error(accuracy.p4d(3), halved) > 0.2
    assert accuracy.mean_error(accuracy.memo_table3(), halved) > 0.2

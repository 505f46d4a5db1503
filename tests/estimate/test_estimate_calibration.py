"""The calibrated verdict on all measured runs, and the fit repeated with one table left out."""

import math

import numpy as np
import pytest
from golden import golden_rows, p4d_cells
from scipy.optimize import linprog

from memo.estimate import calibration
from memo.estimate.answer import answer
from memo.estimate.calibration import CONTEXT_GIB, CP_GIB, FITS_SHARE, OOM_SHARE, STEP_BYTES, USABLE_SHARE
from memo.estimate.cases import read_case
from memo.estimate.verdict import Room, Verdict, judge
from memo.units import GIB

TABLES = ("p4d_table03_measured", "p4d_table04_measured")


def runs(table: str) -> list[dict[str, str]]:
    return [row for row in golden_rows(table) if row["status"] != "not_run"]


def verdicts(table: str) -> list[tuple[Verdict, str]]:
    return [(answer(read_case(p4d_cells(row, "memo"), "test")).verdict, row["status"]) for row in runs(table)]


def test_232_runs_none_called_wrong_and_nine_undecided() -> None:
    found = [pair for table in TABLES for pair in verdicts(table)]
    assert len(found) == 232
    assert found.count((Verdict.FITS, "oom")) == 0
    assert found.count((Verdict.OOM, "ok")) == 0
    assert sum(verdict == Verdict.UNSURE for verdict, _ in found) == 9
    assert found.count((Verdict.FITS, "ok")) == 139
    assert found.count((Verdict.OOM, "oom")) == 84


class Fit:
    """Counted bytes of each run, and what multiplies the three fitted numbers."""

    def __init__(self, table: str) -> None:
        features, counted, limits, signs = [], [], [], []
        for row in runs(table):
            parts = answer(read_case(p4d_cells(row, "memo"), "test")).parts
            shard = parts["optimizer"] / 12 / GIB
            features.append([1.0, math.log2(int(row["cp"])), shard])
            counted.append(sum(parts[name] for name in parts if name not in ("communication", "context", "host")) / GIB)
            limits.append(float(row["gpu_mem_gb"]))
            signs.append(1.0 if row["status"] == "ok" else -1.0)
        self.features, self.counted = np.array(features), np.array(counted)
        self.limits, self.signs = np.array(limits), np.array(signs)

    def best(self) -> tuple[np.ndarray, float]:
        """The numbers with the largest least distance from the limit, as a share of it, and that distance."""
        rows = np.column_stack([self.signs[:, None] * self.features, self.limits])
        bounds = self.signs * (USABLE_SHARE * self.limits - self.counted)
        found = linprog([0, 0, 0, -1], A_ub=rows, b_ub=bounds, bounds=[(0, 2), (0, 4), (0, 6), (-1, 1)])
        assert found.success
        return found.x[:3], float(found.x[3])

    def calls(self, numbers: np.ndarray) -> dict[str, int]:
        """False "fits", false "oom" and undecided runs under other numbers."""
        shares = (self.counted + self.features @ numbers) / (USABLE_SHARE * self.limits)
        fits, oom, ok = shares <= FITS_SHARE, shares > OOM_SHARE, self.signs > 0
        undecided = ~fits & ~oom
        return {"fits": int((fits & ~ok).sum()), "oom": int((oom & ok).sum()), "unsure": int(undecided.sum())}


@pytest.fixture(scope="module")
def fits() -> tuple[Fit, Fit]:
    return Fit(TABLES[0]), Fit(TABLES[1])


def test_the_numbers_are_those_of_the_fit_rounded(fits: tuple[Fit, Fit]) -> None:
    both = Fit(TABLES[0])
    for name in ("features", "counted", "limits", "signs"):
        setattr(both, name, np.concatenate([getattr(fit, name) for fit in fits]))
    numbers, margin = both.best()
    assert margin > 0  # every run on its side
    assert numbers == pytest.approx([CONTEXT_GIB, CP_GIB, STEP_BYTES], abs=0.05)


def test_leaving_one_table_out(fits: tuple[Fit, Fit]) -> None:
    """What calibration.py states: table 3 alone misses one run of table 4, table 4 alone knows nothing of cp."""
    third, fourth = fits
    assert third.calls(third.best()[0])["fits"] == fourth.calls(fourth.best()[0])["fits"] == 0
    assert fourth.calls(third.best()[0]) == {"fits": 1, "oom": 0, "unsure": 1}
    numbers = fourth.best()[0]
    assert numbers[1] == pytest.approx(0, abs=1e-6)
    assert third.calls(numbers)["fits"] == 6


def test_at_most_six_fitted_numbers() -> None:
    assert len([name for name in vars(calibration) if name.isupper()]) == 6


@pytest.mark.parametrize(
    ("gpu", "host", "verdict"),
    [
        (0.98, 0.9, Verdict.FITS),
        (0.981, 0, Verdict.UNSURE),
        (1.005, 0, Verdict.UNSURE),
        (1.006, 0, Verdict.OOM),
        (0.5, 0.91, Verdict.UNSURE),
        (0.5, 1.01, Verdict.OOHM),
        (0.99, 1.01, Verdict.OOHM),
        (1.01, 1.01, Verdict.OOM),
    ],
)
def test_borders(gpu: float, host: float, verdict: Verdict) -> None:
    room = Room(80 * GIB, 1000 * GIB)
    assert judge(gpu * USABLE_SHARE * room.gpu_bytes, host * room.host_bytes, room) == verdict

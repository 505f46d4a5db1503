"""The calibrated verdict on all measured runs, and the fit repeated with a part of them left out."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
from golden import golden_rows, memo_case, p4d_cells
from scipy.optimize import linprog

from memo.config import RunConfig
from memo.config.derived import rank_tokens
from memo.estimate import accounts, calibration, rank_memory
from memo.estimate.calibration import (
    CONTEXT_GIB,
    CONTEXT_SHARE,
    CP_GIB,
    FITS_SHARE,
    OOM_SHARE,
    STEP_BYTES,
    USABLE_SHARE,
)
from memo.estimate.cases import read_case
from memo.estimate.verdict import Capacity, Verdict, judge
from memo.search.estimating import answer
from memo.units import GIB

TABLES = ("p4d_table03_measured", "p4d_table04_measured")


def runs(table: str) -> list[dict[str, str]]:
    return [row for row in golden_rows(table) if row["status"] != "not_run"]


def verdicts(table: str) -> list[tuple[Verdict, str]]:
    return [(answer(read_case(p4d_cells(row, "megatron-lm"), "test")).verdict, row["status"]) for row in runs(table)]


def test_232_runs_none_called_wrong_and_seven_undecided() -> None:
    found = [pair for table in TABLES for pair in verdicts(table)]
    assert len(found) == 232
    assert found.count((Verdict.FITS, "oom")) == 0
    assert found.count((Verdict.OOM, "ok")) == 0
    assert sum(verdict == Verdict.UNSURE for verdict, _ in found) == found.count((Verdict.UNSURE, "ok")) == 7
    assert found.count((Verdict.FITS, "ok")) == 138
    assert found.count((Verdict.OOM, "oom")) == 87


@dataclass(frozen=True)
class Calls:
    """How many runs were called wrong, and how many were undecided."""

    fits: int
    oom: int
    unsure: int


class Needs:
    """What runs need: counted GiB, and what multiplies the four fitted numbers; of which devices."""

    def __init__(self, cases: list[dict[str, str]]) -> None:
        answers = [answer(read_case(case, "test")) for case in cases]
        fitted = {"communication", "context", "host"}
        counted = [sum(size for name, size in found.parts.items() if name not in fitted) for found in answers]
        gradients = [found.parts["gradients"] / GIB for found in answers]
        shards = [found.parts["optimizer"] / 12 / GIB for found in answers]
        doublings = [math.log2(int(case["cp"])) for case in cases]
        self.counted = np.array(counted) / GIB
        self.features = np.column_stack([np.ones(len(cases)), gradients, doublings, shards])
        self.limits = USABLE_SHARE * np.array([float(case["gpu_memory_gib"]) for case in cases])

    def shares(self, numbers: np.ndarray) -> np.ndarray:
        """Of the usable memory."""
        needed: np.ndarray = self.counted + self.features @ numbers
        return needed / self.limits


class Runs:
    """The measured runs, and fits on parts of them."""

    def __init__(self) -> None:
        rows = [(table, row) for table in TABLES for row in runs(table)]
        self.cells = [p4d_cells(row, "megatron-lm") for _, row in rows]
        self.needs = Needs(self.cells)
        self.ran = np.array([row["status"] == "ok" for _, row in rows])
        of = {name: np.array([int(row[name]) for _, row in rows]) for name in ("tp", "cp", "pp", "mbs", "gpus")}
        layout = 100 * of["tp"] + 10 * of["cp"] + of["pp"]
        self.of = {**of, "layout": layout, "table": np.array([TABLES.index(table) for table, _ in rows])}
        self.guard = Needs([memo_case(row) for row in golden_rows("memo_table7_memo") if ran_in_memo(row)])

    def sides(self) -> tuple[np.ndarray, np.ndarray]:
        """A x <= b for all runs: x, the four numbers and the distance, puts each on its side of its limit."""
        signs, needs = np.where(self.ran, 1.0, -1.0), self.needs
        rows = np.column_stack([signs[:, None] * needs.features, needs.limits / USABLE_SHARE])
        return rows, signs * (needs.limits - needs.counted)

    def fit(self, among: np.ndarray, constant_alone: bool = False) -> tuple[np.ndarray, float]:
        """The numbers with the largest least distance of a run from its limit, as a share of it, and that distance."""
        guard = self.guard
        rows, bounds = (side[among] for side in self.sides())
        guarded = np.column_stack([guard.features, np.zeros(len(guard.counted))])
        found = linprog(
            [0, 0, 0, 0, -1],
            A_ub=np.vstack([rows, guarded]),
            b_ub=np.concatenate([bounds, FITS_SHARE * guard.limits - guard.counted]),
            bounds=[(0, 2), (0, 0 if constant_alone else 1), (0, 4), (0, 6), (-1, 1)],
        )
        assert found.success
        return found.x[:4], float(found.x[4])

    def left_out(self, what: str, constant_alone: bool = False) -> np.ndarray:
        """Shares of all runs, each by a fit without any run of the same `what`."""
        found = np.empty(len(self.ran))
        for value in np.unique(self.of[what]):
            out = self.of[what] == value
            found[out] = self.needs.shares(self.fit(~out, constant_alone)[0])[out]
        return found

    def calls(self, shares: np.ndarray, among: np.ndarray | None = None) -> Calls:
        among = np.ones_like(self.ran) if among is None else among
        fits, oom = shares <= FITS_SHARE, shares > OOM_SHARE
        found = (fits & ~self.ran, oom & self.ran, ~fits & ~oom)
        return Calls(*(int((calls & among).sum()) for calls in found))


def ran_in_memo(row: dict[str, str]) -> bool:
    """But for the row whose weights and fp32 gradients alone take 90 GiB of 80."""
    return row["status"] == "ok" and (row["model"], row["seq_k"]) != ("65B", "128")


@pytest.fixture(scope="module")
def measured() -> Runs:
    return Runs()


def test_the_numbers_are_those_of_the_fit_rounded(measured: Runs) -> None:
    everything = np.ones_like(measured.ran)
    numbers, margin = measured.fit(everything)
    assert margin == pytest.approx(0.005, abs=5e-5)  # every run on its side
    assert numbers == pytest.approx([CONTEXT_GIB, CONTEXT_SHARE, CP_GIB, STEP_BYTES], abs=0.01)
    assert numbers[1] == pytest.approx(CONTEXT_SHARE, abs=1e-3)
    assert measured.fit(everything, constant_alone=True)[1] == pytest.approx(0.0024, abs=5e-5)


@pytest.mark.parametrize(
    ("what", "unsure", "by_a_constant"), [("layout", 7, 1), ("gpus", 9, 1), ("mbs", 8, 1), ("tp", 9, 2)]
)
def test_what_is_left_out_is_not_called_wrong(measured: Runs, what: str, unsure: int, by_a_constant: int) -> None:
    """And a constant alone would call some wrong."""
    assert measured.calls(measured.left_out(what)) == Calls(0, 0, unsure)
    constant = measured.calls(measured.left_out(what, constant_alone=True))
    assert constant.fits + constant.oom == by_a_constant


def test_the_fit_of_one_table_judges_the_other(measured: Runs) -> None:
    third, fourth = (measured.of["table"] == table for table in (0, 1))
    assert (third.sum(), fourth.sum()) == (147, 85)
    assert measured.calls(measured.needs.shares(measured.fit(third)[0]), fourth) == Calls(0, 0, 2)
    numbers, _ = measured.fit(fourth)
    assert numbers[2] == pytest.approx(0, abs=1e-6)  # it knows nothing of cp
    assert measured.calls(measured.needs.shares(numbers), third).fits == 6
    assert measured.calls(measured.left_out("pp")).fits == 6


def test_a_third_of_the_unsure_ran_out_of_memory(measured: Runs) -> None:
    """Of those that are unsure when left out: the risk that calibration.py states."""
    shares = np.concatenate([measured.left_out(what) for what in ("layout", "gpus", "mbs", "tp")])
    unsure = (shares > FITS_SHARE) & (shares <= OOM_SHARE)
    failed = unsure & ~np.tile(measured.ran, 4)
    assert (unsure.sum(), failed.sum()) == (33, 11)


@pytest.mark.parametrize(
    ("fused", "logit_bytes", "margin"), [(False, 6, -0.0124), (True, 10, -0.0220), (True, 6, -0.0417)]
)
def test_bytes_that_the_code_keeps_leave_runs_on_the_wrong_side(
    fused: bool, logit_bytes: int, margin: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By these shares of their limit, whatever the four numbers: fused SwiGLU, and 6 bytes a logit."""
    layer, worst = rank_memory.layer_activation_bytes, rank_memory.worst_rank
    monkeypatch.setattr(accounts, "worst_rank", lambda *run, **how: worst(*run, **how | {"logit_bytes": logit_bytes}))
    if fused:
        monkeypatch.setattr(rank_memory, "layer_activation_bytes", lambda config: layer(config) - silu_bytes(config))
    counted = Runs()
    found = linprog([0, 0, 0, 0, -1], *counted.sides(), bounds=[(0, None)] * 4 + [(None, None)])
    assert found.success and found.x[4] == pytest.approx(margin, abs=1e-4)


def silu_bytes(config: RunConfig) -> int:
    """silu(gate), which a kernel for all of SwiGLU does not keep."""
    return rank_tokens(config) * 2 * config.model.ffn_size // config.parallel.tp


def test_all_accounts_by_tokens_say_alike_of_two_sequences_of_16k(measured: Runs) -> None:
    """On 4 H100 under tp 2 and cp 2 they hold as many tokens as four of 8K, which ran out of memory.

    With bytes a token, a logit, a token of each doubling of cp, a chip, and a second node left free, too, all accounts
    that place the runs rightly are of one mind, even where that of four sequences of 8K is not among them.
    """
    sizes = {"model": "llama-3.1-8b", "tp": "2", "cp": "2", "pp": "1", "gpus": "4", "method": "megatron-lm"}
    h100 = {**sizes, "hardware": "h100-94gb", "gpu_memory_gib": "94"}
    long, short = ({**h100, "seq_len": length, "mbs": mbs} for length, mbs in (("16384", "2"), ("8192", "4")))
    asked = Needs([long, short])
    assert asked.counted[0] == asked.counted[1]
    at = measured.cells.index(short)
    assert not measured.ran[at]
    numbers = np.column_stack([measured.needs.features, list(map(more_features, measured.cells))])
    of_long = np.concatenate([asked.features[0], more_features(long)])
    signs, others = np.where(measured.ran, 1.0, -1.0), np.arange(len(measured.ran)) != at
    rows, bounds = signs[:, None] * numbers, signs * (measured.needs.limits - measured.needs.counted)
    ends = [
        linprog(sign * of_long, rows[others], bounds[others], bounds=[(0, None)] * 4 + [(None, None)] * 5)
        for sign in (1, -1)
    ]
    shares = [(asked.counted[0] + of_long @ end.x) / asked.limits[0] for end in ends]
    assert shares == pytest.approx([1.062, 1.176], abs=2e-3)


def more_features(case: dict[str, str]) -> list[float]:
    tokens = int(case["seq_len"]) * int(case["mbs"]) / int(case["cp"]) / int(case["tp"])
    is_h100 = case["hardware"] == "h100-94gb"
    nodes = int(case["gpus"]) > (4 if is_h100 else 8)
    return [tokens / 8192 * each for each in (1, case["pp"] == "1", math.log2(int(case["cp"])))] + [is_h100, nodes]


def test_at_most_six_fitted_numbers() -> None:
    """One is read off devices."""
    assert len({name for name in vars(calibration) if name.isupper()} - {"USABLE_SHARE"}) == 6


@pytest.mark.parametrize(
    ("gpu", "host", "verdict"),
    [
        (0.98, 0.9, Verdict.FITS),
        (0.981, 0, Verdict.UNSURE),
        (1.003, 0, Verdict.UNSURE),
        (1.004, 0, Verdict.OOM),
        (0.5, 0.91, Verdict.UNSURE),
        (0.5, 1.01, Verdict.OOHM),
        (0.99, 1.01, Verdict.OOHM),
        (1.01, 1.01, Verdict.OOM),
    ],
)
def test_borders(gpu: float, host: float, verdict: Verdict) -> None:
    capacity = Capacity(80 * GIB, 1000 * GIB, "megatron-lm")
    assert judge(gpu * USABLE_SHARE * capacity.gpu_bytes, host * capacity.host_bytes, capacity) == verdict

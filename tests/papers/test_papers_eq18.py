"""Equation 18 against every printed cell, and its zones against every measured one."""

from collections import Counter

import pytest
from golden import golden_rows, p4d_cells

from memo.config import preset
from memo.estimate.cases import read_case
from memo.estimate.verdict import Verdict
from memo.papers.eq18 import eq18, zone
from memo.papers.methods import answer_by_paper
from memo.search.estimating import Answer
from memo.spec.shapes import shape_of
from memo.units import GIB


def ask(row: dict[str, str]) -> Answer:
    return answer_by_paper(read_case(p4d_cells(row, "eq18"), "test"))


def test_every_printed_cell_of_table_2() -> None:
    rows = [row for row in golden_rows("p4d_table02_estimate") if row["status"] == "ok"]
    assert len(rows) == 147
    for row in rows:
        assert ask(row).total_bytes / GIB == pytest.approx(float(row["estimate_gb"]), abs=0.0075), row


def test_anchor() -> None:
    shape = shape_of(preset("llama-3.1-8b"), "", 8192)
    estimate = eq18(shape, 8192, tp=2, cp=1, pp=1, micro_batch=1, gpus=4)
    assert estimate.states_bytes / GIB == pytest.approx(44.874069, abs=5e-7)
    assert estimate.activation_bytes / GIB == pytest.approx(22.644531, abs=5e-7)
    in_two = eq18(shape, 8192, tp=1, cp=2, pp=1, micro_batch=1, gpus=4)
    assert sum(in_two) / GIB == pytest.approx(89.95, abs=0.005)


@pytest.mark.parametrize(("name", "figures"), [("llama-3.1-8b", 8_030_261_248), ("llama-3.1-70b", 70_553_706_496)])
def test_states_count_all_parameters(name: str, figures: int) -> None:
    alone = {"tp": 1, "cp": 1, "pp": 1, "micro_batch": 1, "gpus": 1}
    states = eq18(shape_of(preset(name), "", 8192), 8192, **alone).states_bytes
    assert states == pytest.approx(18 * figures, rel=1e-12)


def test_zones_of_232_runs() -> None:
    """As docs/estimators.md counts them: green never ran out of memory, red always did."""
    rows = [*golden_rows("p4d_table03_measured"), *golden_rows("p4d_table04_measured")]
    seen = Counter((ask(row).verdict, row["status"]) for row in rows if row["status"] != "not_run")
    yellow = {(Verdict.UNSURE, "ok"): 20, (Verdict.UNSURE, "oom"): 29}
    assert seen == {(Verdict.FITS, "ok"): 125, (Verdict.OOM, "oom"): 58, **yellow}


def test_borders_of_the_zones() -> None:
    assert [zone(need, 100) for need in (80, 80.001, 100, 100.001)] == ["fits", "unsure", "unsure", "oom"]

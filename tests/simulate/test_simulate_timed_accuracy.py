"""memo's simulator held to the program's virtual time at full size: both modelled; docs/swapping.md explains more."""

from typing import Any

import pytest
import rows
import timed_accuracy

KEPT = rows.read("timed_accuracy")
SAME_KERNELS = 0.0005
MOST_IDLE = 0.024
MOST_ELEMENTWISE = {64: 0.043, 192: 0.023, 256: 0.019, 1024: 0.006}
"""By thousands of tokens: torch's kernels read and write more than fused ones, which the simulator counts."""
MOST_OFF_HIDDEN = 0.03


def test_rows_cover_both_models_all_lengths_and_all_ways() -> None:
    assert {row["name"] for row in KEPT} >= {case.name for case in timed_accuracy.cases("h100-80")}


@pytest.mark.parametrize("row", KEPT, ids=lambda row: row["name"])
def test_a_step_is_foreseen(row: dict[str, Any]) -> None:
    expected, found = timed_accuracy.foreseen(row), timed_accuracy.by_kind(row["seconds"])
    step_s = expected["step_time_s"]
    more = {kind: (found[kind] - expected["seconds"][kind]) / step_s for kind in timed_accuracy.FORESEEN}
    assert abs(more["matmul"]) < SAME_KERNELS and abs(more["attention"]) < SAME_KERNELS
    assert 0 <= more["elementwise"] < MOST_ELEMENTWISE[row["seq_length"] // 1024]
    assert abs(row["step_time_s"] / step_s - 1 - sum(more.values())) < MOST_IDLE
    hidden = 1.0 if row["hidden_share"] is None else row["hidden_share"]
    assert hidden == pytest.approx(expected["hidden_share"], abs=MOST_OFF_HIDDEN)

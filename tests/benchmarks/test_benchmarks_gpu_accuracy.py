"""gpu_accuracy.py: steps of memo on one H200 beside what it foresees of them."""

import math
import statistics

import gpu_accuracy as benchmark
import pytest
import rows

STEPS = {
    row["name"]: benchmark.foreseen(row)["step_s"] / row["step_p50_s"] - 1
    for row in rows.read("full/gpu_accuracy")
    if row["status"] == "ok" and row["device"] == "NVIDIA H200" and benchmark.foreseen(row)
}
CHOSE = {
    "llama-3.1-8b of 16 layers, one rank of 8, 128K, none",
    "llama-3.1-8b of 16 layers, one rank of 8, 128K, full-recompute",
    "llama-3.1-8b of 16 layers, one rank of 8, 32K, none",
    "gpt-oss-20b, QLoRA, 64K",
    "llama-3.2-1b, 128K",
}
"""By which the attention of Hopper was chosen: no copies, and no operations that torch runs one by one."""
SWAPS = {f"llama-3.1-8b of 16 layers, one rank of 8, {length}, full-swap-plan" for length in ("32K", "128K")}


def test_steps_that_chose_attention_are_foreseen_without_bias() -> None:
    """As memo.estimate.time_errors and docs/estimators.md say."""
    errors = [STEPS[name] for name in CHOSE]
    assert statistics.mean(map(math.log1p, errors)) == pytest.approx(0.0, abs=0.005)
    assert min(errors) == pytest.approx(-0.05, abs=0.005) and max(errors) == pytest.approx(0.07, abs=0.005)


def test_steps_that_swap_are_foreseen_with_the_link_of_one_gpu_alone() -> None:
    for name in SWAPS:
        assert abs(STEPS[name]) < 0.05

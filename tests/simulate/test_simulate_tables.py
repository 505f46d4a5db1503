"""Predictions against the papers' measured tables, through benchmarks/simulator_accuracy.py."""

from dataclasses import replace
from typing import Any

import pytest
import simulator_accuracy as accuracy

from memo.config.checks import check
from memo.estimate.hardware import Efficiency
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.time_errors import time_error


@pytest.mark.parametrize(("number", "bound"), [(3, 0.085), (4, 0.034)])
def test_throughput_of_the_4d_paper(number: int, bound: float) -> None:
    rows = accuracy.p4d(number)
    assert len(rows) == {3: 85, 4: 60}[number]
    assert accuracy.mean_error(rows) <= bound


def test_runs_of_megatron_lm_are_foreseen_with_its_own_messages_and_order_of_ranks() -> None:
    """Not with memo's: as if memo had run the 4D paper's A100 rows, they would be off by more."""
    rows = accuracy.p4d(3)
    as_memo = [replace(row, framework=replace(accuracy.MEMO, fuses=True)) for row in rows]
    in_memos_order = [replace(row, framework=accuracy.MEGATRON_LM) for row in rows]
    assert accuracy.mean_error(rows) + 0.01 < accuracy.mean_error(as_memo)
    assert accuracy.share_within(rows) + 0.01 < accuracy.share_within(in_memos_order) < accuracy.share_within(as_memo)


@pytest.mark.parametrize("number", [3, 4])
def test_the_layout_chosen_is_nearly_the_best_measured(number: int) -> None:
    """Of the layouts that did not run out of memory, at every number of GPUs."""
    regrets = accuracy.regrets(accuracy.p4d(number))
    assert list(regrets) == {3: [8, 16, 32, 64, 128, 256], 4: [4, 8, 16, 32, 64]}[number]
    assert max(regrets.values()) <= 0.01


def test_context_parallelism_is_foreseen_to_be_faster_than_tensor_parallelism_where_it_was_measured_so() -> None:
    """On H100, cp 2 beside tp 2 on as many GPUs: products add weight gradients, so that cp, which does not divide them,
    pays no pass over them."""
    by_layout = {(m.gpus, m.layout): m for m in accuracy.p4d(4)}
    pairs = [(m, by_layout.get((gpus, (1, 2, 1, 1)))) for (gpus, at), m in by_layout.items() if at == (2, 1, 1, 1)]
    met = [(tensor, context) for tensor, context in pairs if context is not None]
    assert len(met) >= 3
    for tensor, context in met:
        assert context.tflops_per_gpu > tensor.tflops_per_gpu
        assert context.predicted().tflops_per_gpu > tensor.predicted().tflops_per_gpu


def test_mfu_of_memo() -> None:
    rows = accuracy.memo_table3()
    assert len(rows) == 9 + 12
    assert accuracy.mean_error(rows) <= 0.05


def test_ablation_of_memo() -> None:
    """Full recomputation with planned memory, and full swapping, whose copies hide only from 256K on."""
    rows = accuracy.memo_table4()
    assert accuracy.mean_error(rows) <= 0.05
    swapped = [m for m in rows if m.alpha == 1.0]
    hidden = [m.predicted().hidden_share for m in swapped]
    assert hidden[0] < hidden[1] < 1.0
    assert hidden[2] == pytest.approx(1.0, abs=0.02)


def covered(runs: list[Any], scale: float = 1.0, efficiency: Efficiency | None = None) -> float:
    """Of the runs, the share within the bar of each, which may be scaled."""
    within = [abs(m.error(efficiency)) <= scale * accuracy.bar(m, efficiency) for m in runs]
    return sum(within) / len(within)


def test_nine_of_ten_published_runs_lie_within_the_bars_that_plans_would_show() -> None:
    """And fewer within bars that are smaller by a quarter: they are no larger than the runs ask for. Runs of MEMO are
    all within half of theirs, most of which is for messages and waiting that they have little of."""
    for number, runs in ((3, 85), (4, 60)):
        table = accuracy.p4d(number)
        assert len(table) == runs and covered(table) >= 0.9 > covered(table, 0.75)
    swapped = [*accuracy.memo_table3(), *accuracy.memo_table4()]
    assert len(swapped) == 30 and covered(swapped) == 1.0
    assert sum(accuracy.bar(m) for m in swapped) / 30 < 0.065


def test_a_chip_without_runs_has_the_error_that_another_chips_efficiencies_had_on_h100() -> None:
    found = accuracy.share_within(accuracy.p4d(4), HARDWARE["a100-40"].efficiency)
    shown = accuracy.bar(accuracy.p4d(4)[0], HARDWARE["a100-40"].efficiency)
    assert found <= shown < found + 0.02


def test_ties_are_pairs_that_nobody_could_order() -> None:
    """What the module of TIE_SHARE states of its pairs of published runs."""
    pairs = [*accuracy.leads(accuracy.p4d(3)), *accuracy.leads(accuracy.p4d(4))]
    shares = accuracy.rightly_ordered(pairs)
    assert 1 - shares["ties"] == pytest.approx(3 / 10, abs=0.02)
    assert 1 - shares["others"] == pytest.approx(1 / 21, abs=0.005)


@pytest.mark.parametrize("name", ["gh200", "b300", "a100-80-pcie", "rtx-4090", "mi300x", "cpu"])
def test_a_machine_without_published_runs_has_the_error_of_a_guess(name: str) -> None:
    parts = accuracy.parts(accuracy.p4d(4)[0])
    guess = time_error(HARDWARE[name], parts)
    assert guess.share == pytest.approx(0.3)
    for known in ("a100-40", "a800-80", "h100-80", "h200", "b200"):
        assert time_error(HARDWARE[known], parts).share < 0.6 * guess.share
    changed = HARDWARE["h100-80"].efficiency
    faster = replace(HARDWARE["h100-80"], efficiency=replace(changed, matmul=changed.matmul + 0.1))
    assert time_error(faster, parts) == guess


def test_every_row_is_a_run_that_memo_accepts() -> None:
    for row in [*accuracy.p4d(3), *accuracy.p4d(4), *accuracy.memo_table3(), *accuracy.memo_table4()]:
        check(row.config, row.gpus, needs_data=False)


def test_tables_tell_good_shares_from_bad_ones() -> None:
    """A model that fits whatever it is told would prove nothing: halved shares break every bound."""
    halved = replace(HARDWARE["a800-80"].efficiency, matmul=0.41, attention_forward=0.32, attention_backward=0.25)
    assert accuracy.mean_error(accuracy.p4d(3), halved) > 0.2
    assert accuracy.mean_error(accuracy.memo_table3(), halved) > 0.2

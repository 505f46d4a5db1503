"""Learning rates: Megatron's styles, at their ends, their corners, and monotonic between."""

import itertools
import math

import pytest

from memo.config import RunConfig
from memo.train.optimizer import learning_rate, schedule_of

STYLES = ("constant", "linear", "cosine", "WSD")


def rates(style: str, **overrides: object) -> list[float]:
    """Learning rates of steps 1 ... 60."""
    values = {"lr": 1e-3, "min_lr": 1e-4, "train_iters": 50, "lr_warmup_iters": 10, "lr_decay_style": style}
    config = RunConfig().override({**values, **overrides})
    return [learning_rate(config, iteration) for iteration in range(1, 61)]


@pytest.mark.parametrize("style", STYLES)
def test_warmup_is_linear_and_ends_at_the_peak(style: str) -> None:
    found = rates(style)
    assert found[:10] == pytest.approx([1e-4 * i for i in range(1, 11)], rel=1e-14)
    assert max(found) == 1e-3


@pytest.mark.parametrize("style", STYLES)
def test_decay_never_rises_and_ends_at_the_floor(style: str) -> None:
    found = rates(style)[9:]
    assert all(later <= earlier for earlier, later in itertools.pairwise(found))
    end = 1e-3 if style == "constant" else 1e-4
    assert found[40:] == pytest.approx([end] * 11, rel=1e-12)  # step 50 and all later ones
    if style != "constant":
        assert found[39] > 1e-4


def test_midpoints() -> None:
    """Halfway from step 10 to step 50: the line and the cosine cross at the mean of peak and floor."""
    assert rates("linear")[29] == pytest.approx(5.5e-4, rel=1e-12)
    assert rates("cosine")[29] == pytest.approx(5.5e-4, rel=1e-12)
    assert rates("cosine")[19] == pytest.approx(1e-4 + 4.5e-4 * (1 + math.cos(math.pi / 4)), rel=1e-12)


def test_wsd_stays_at_the_peak_and_falls_in_a_line() -> None:
    found = rates("WSD")  # the last tenth of 50 steps: 45 is the peak, 50 the floor
    assert found[9:45] == [1e-3] * 36
    assert found[44:50] == pytest.approx([1e-3 - 1.8e-4 * i for i in range(6)], rel=1e-12)
    assert rates("WSD", lr_wsd_decay_iters=20)[39] == pytest.approx(5.5e-4, rel=1e-12)


@pytest.mark.parametrize("style", STYLES)
def test_without_warmup_the_first_step_is_near_the_peak(style: str) -> None:
    first = rates(style, lr_warmup_iters=0)[0]
    assert 0.98e-3 < first <= 1e-3


def test_decay_iters_may_differ_from_train_iters() -> None:
    assert rates("linear", lr_decay_iters=30)[29] == pytest.approx(1e-4, rel=1e-12)
    assert rates("cosine", lr_decay_iters=200)[49] > 8e-4
    assert rates("cosine", lr_warmup_iters=50)[48:51] == pytest.approx([9.8e-4, 1e-3, 1e-4], rel=1e-12)


def test_by_default_the_rate_fits_the_weights() -> None:
    for given, peak, warmup in ((None, 3e-4, 10), ("a model", 1e-5, 100)):
        config = RunConfig().override({"pretrained_checkpoint": given, "train_iters": 1000})
        found = [learning_rate(config, iteration) for iteration in range(1, 1001)]
        assert found[:warmup] == pytest.approx([peak * i / warmup for i in range(1, warmup + 1)], rel=1e-14)
        assert found[warmup - 1] == max(found) == pytest.approx(peak, rel=1e-14) and found[warmup] < peak
        flags = {"--lr": peak, "--lr-warmup-iters": warmup}
        assert flags.items() <= schedule_of(config).items()
        assert learning_rate(config.override({"lr": 0.5, "lr_warmup_iters": 0, "lr_decay_style": "constant"}), 1) == 0.5

"""Each wait, recording, message and copy of a few flows is lost once: told, or shown redundant. A part of the whole
campaign (order_campaign.py): training takes seconds an order, so a few of each place are tried here."""

from collections.abc import Sequence

import pytest
from order_campaign import Verdict, unexplained, verdicts_of

from memo.emulated_gpu.face import EmulatedGpu


@pytest.mark.parametrize(
    ("flow", "most"),
    [
        ("engine, own plan", None),
        ("engine, 1 stage, 5 layers, 2 microbatches", None),
        ("engine, pp 2 stage 0, 8 layers, 4 microbatches", 10),
        ("states", 1),
    ],
)
def test_every_lost_order_is_told_or_redundant(gpu: EmulatedGpu, flow: str, most: int | None) -> None:
    check(verdicts_of([flow], most)[flow])


def test_every_lost_message_is_told_or_redundant(gpu: EmulatedGpu) -> None:
    """Two ranks, whose checkers judge each its own orders."""
    for verdicts in verdicts_of(["pp, planned", "tp"], most=1).values():
        check(verdicts)


def check(verdicts: Sequence[Verdict]) -> None:
    assert unexplained(verdicts) == []
    assert "caught" in [verdict.outcome for verdict in verdicts]  # the checker is awake

"""Each wait, recording and copy of a few flows is lost once: told, or shown redundant. A part of the whole campaign."""

import pytest
from order_campaign import Campaign, unexplained

from memo.emulated_gpu.face import EmulatedGpu


@pytest.mark.parametrize(
    ("flow", "every"),
    [
        ("engine, own plan", 1),
        ("engine, 1 stage, 5 layers, 2 microbatches", 1),
        ("engine, pp 2 stage 0, 8 layers, 4 microbatches", 2),
        ("states", 17),
        ("optimizer", 17),
    ],
)
def test_every_lost_order_is_told_or_redundant(gpu: EmulatedGpu, flow: str, every: int) -> None:
    """Training takes seconds an order, so one in `every` is tried here, and all by order_campaign.py."""
    verdicts = Campaign(flow, gpu).run(every)
    outcomes = [verdict.outcome for verdict in verdicts]
    assert unexplained(verdicts) == []
    assert "caught" in outcomes  # the checker is awake

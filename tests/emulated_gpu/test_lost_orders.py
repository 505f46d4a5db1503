"""Each wait, recording, message and copy of a few flows is lost once: told, or shown redundant. A part of the whole
campaign (order_campaign.py): training takes seconds an order, so a few of each place are tried here."""

from collections.abc import Sequence

import pytest
from order_campaign import FEW_IN, Campaign, Verdict, unexplained, verdicts_of
from order_flows import BASE
from orders import Order

from memo.emulated_gpu.face import EmulatedGpu


@pytest.mark.parametrize(
    ("flow", "most"),
    [
        ("engine, own plan", None),
        ("engine, 1 stage, 5 layers, 2 microbatches", None),
        ("engine, pp 2 stage 0, 8 layers, 4 microbatches", 10),
        ("states", 1),
        ("experts, swap", 1),
        ("delta nets, swept", 1),
    ],
)
def test_every_lost_order_is_told_or_redundant(gpu: EmulatedGpu, flow: str, most: int | None) -> None:
    check(flow, verdicts_of([flow], most)[flow])


def test_every_lost_message_is_told_or_redundant(gpu: EmulatedGpu) -> None:
    """Two ranks, whose checkers judge each its own orders. Experts gather their weights and sum their load."""
    flows = ["pp, planned", "tp", "tp, experts", "dp, weights in shards, states, experts", "cp by a2a, delta nets"]
    for flow, verdicts in verdicts_of(flows, most=1).items():
        check(flow, verdicts)


def check(flow: str, verdicts: Sequence[Verdict]) -> None:
    assert unexplained(flow, verdicts) == []
    assert "caught" in [verdict.outcome for verdict in verdicts]  # the checker is awake


def test_a_reason_for_a_few_holds_in_its_flow_and_for_no_more() -> None:
    (flow, place), (most, _) = next(iter(FEW_IN.items()))
    needless = [Verdict(Order(place, turn), "needless") for turn in range(most + 1)]
    assert unexplained(flow, needless[:most]) == []
    assert unexplained(flow, needless) == unexplained("swap", needless[:1]) == [place]


def test_a_step_with_other_calls_is_refused(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies are timed in the step of a log: its recordings have other places, so an order to lose may be missing."""
    monkeypatch.setitem(BASE, "log_interval", 5)
    campaign = Campaign("states", gpu)
    with pytest.raises(AssertionError, match="other calls than the warm-up"):
        campaign.run(most=1)
    campaign.flow.close()
    gpu.clear()  # the order lost in the step before may be told

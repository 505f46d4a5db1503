"""The error of a foreseen step is that of its parts."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from memo.config import RunConfig, preset
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.time_errors import HOST_STEP_S, PARTS, Copies, StepParts, time_error
from memo.simulate import predict_step

H100, A800 = HARDWARE["h100-80"], HARDWARE["a800-80"]
NO_COPIES = Copies(0, 0, 0, 0)


def run(values: Mapping[str, object]) -> RunConfig:
    return RunConfig(model=preset("llama-3.1-8b")).override({"device": "cuda", "gbs": 8, **values})


def parts_of(values: Mapping[str, object], hardware: Hardware) -> StepParts:
    return predict_step(run(values), 8, hardware).parts


@pytest.mark.parametrize(
    "values",
    [
        {"seq_length": 8192, "tp": 2, "pp": 2, "gbs": 16, "offload_alpha": "off"},
        {"seq_length": 65536, "recompute_granularity": "full", "offload_alpha": "off"},
        {"seq_length": 65536, "tp": 4, "pp": 2, "gbs": 16},
        {"seq_length": 262144, "cp": 8},
        {"seq_length": 65536, "offload_alpha": 1.0},
    ],
)
def test_parts_add_up_to_the_step(values: dict[str, object]) -> None:
    parts = parts_of({"offload_alpha": "auto", **values}, H100)
    step_s = predict_step(run({"offload_alpha": "auto", **values}), 8, H100).step_time_s
    assert parts.step_s == pytest.approx(step_s, rel=1e-6)
    error = time_error(H100, parts)
    assert set(error.shares) == set(PARTS) and error.share == pytest.approx(sum(error.shares.values()))


def test_bars_at_64k_and_1m_tokens_differ_because_a_step_of_1m_is_attention() -> None:
    """Attention is what is known least of on H100, and products are what is known best: so a long step's bar is nearly
    that of attention, and a short one's is nearer to that of products. What the host takes in a step, whatever its
    length, is most of the bar of a short one and nothing beside a long one's."""
    bars, hosts = {}, []
    for length in (8192, 65536, 1 << 20):
        parts = parts_of({"seq_length": length, "tp": 8, "offload_alpha": "off"}, H100)
        error = time_error(H100, parts)
        attention = parts.attention / parts.step_s
        assert error.shares["attention"] == pytest.approx(0.2 * attention)
        assert error.shares["products"] == pytest.approx(0.04 * parts.products / parts.step_s)
        hosts.append(error.shares["host"] * parts.step_s)
        bars[length] = attention, error.share - error.shares["host"]
    (short, low), (middle, bar), (long, high) = bars.values()
    assert short < 0.15 and 0.35 < middle < 0.6 and long > 0.9
    assert low < 0.08 < 0.11 < bar < 0.14 < 0.18 < high
    assert hosts == pytest.approx([HOST_STEP_S] * 3, rel=0.1)


def test_on_a800_a_long_step_is_known_better_than_a_short_one() -> None:
    """There the paper's own runs are long, and messages and waiting of short ones are known least."""
    short, long = (
        time_error(A800, parts_of({"seq_length": length, "tp": 4, "cp": 2, "offload_alpha": "off"}, A800)).share
        for length in (8192, 1 << 20)
    )
    assert long < 0.06 < 0.1 < short


@pytest.mark.parametrize("hardware", [H100, A800], ids=lambda hardware: hardware.name)
@pytest.mark.parametrize(
    "values",
    [{"seq_length": 65536}, {"seq_length": 65536, "tp": 2}, {"seq_length": 98304, "tp": 2, "pp": 2, "gbs": 16}],
)
def test_a_slower_link_costs_no_more_than_the_bar_says(hardware: Hardware, values: dict[str, object]) -> None:
    """alpha auto plans anew for the slower link: what it costs then is simulated, and the bar is not twice of that."""
    values = {**values, "offload_alpha": "auto"}
    parts = parts_of(values, hardware)
    share = next(each.shares["copies"] for each in time_error(hardware, parts).evidence if "copies" in each.shares)
    rates = {name: getattr(hardware, name) / (1 + share) for name in ("offload_gb_per_s", "prefetch_gb_per_s")}
    slower_s = predict_step(run(values), 8, replace(hardware, **rates)).step_time_s
    late_s = slower_s - parts.step_s
    assert 0.9 * late_s < parts.late_copies_s(share) < 2 * late_s + 0.001 * parts.step_s


def test_late_copies_by_hand() -> None:
    base = StepParts(4.0, 3.0, 0.5, 0.5, 0.0, 0.0, 0.0, NO_COPIES, 0.0)
    assert base.step_s == 8.0 and base.late_copies_s(0.5) == 0.0
    given = Copies(offload=3.0, prefetch=3.0, forward=2.5, backward=5.5)  # half a second waits in forward already
    assert base._replace(of_activations=given, copies=0.5, link=3.0).late_copies_s(0.5) == pytest.approx(1.5)
    # A third of the bytes less, two thirds of what may be left out.
    chosen = given._replace(always_share=0.5, spared=1.2)
    assert chosen.late_s(0.5) == pytest.approx(0.8)
    assert chosen._replace(always_share=0.9).late_s(0.5) == pytest.approx(1.55)  # what always moves is late by itself
    states = base._replace(link=7.0)
    assert states.late_copies_s(0.5) == pytest.approx(2.5)


def test_what_is_told_of_a_machine() -> None:
    error = time_error(H100, parts_of({"seq_length": 65536, "offload_alpha": "auto"}, H100))
    parts = (
        "attention 20%, products 4%, messages 10%, token-wise 10%, waiting 10%, host 50% and 0.22 s a step, copies 50%"
    )
    assert str(error) == f"±%: errors of the seconds of a step: {parts}"

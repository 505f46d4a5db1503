"""The choice by a measured table: the quickest that may run, its reason, and the rule where nothing was measured."""

from collections.abc import Iterator

import pytest
import torch

from memo.artifacts.attention_table import AttentionCase, AttentionRow, AttentionTable
from memo.attention import select
from memo.attention.select import AttentionChoice, choose_backend, is_installed
from memo.errors import ConfigError

OWN = AttentionCase(128, "bf16", causal=True, packed=False, tokens=32768)
OTHER = AttentionCase(128, "bf16", causal=False, packed=False, tokens=32768)
DAY = "2026-01-31T12:00:00+01:00"


def table(**seconds: dict[AttentionCase, float]) -> AttentionTable:
    """Times by backend and case."""
    cases = {case for times in seconds.values() for case in times}
    rows = [
        AttentionRow(case, 4, 4, 1, DAY, {name: times[case] for name, times in seconds.items() if case in times}, {})
        for case in sorted(cases, key=str)
    ]
    return AttentionTable("a GPU", "2.13.0", "0.1.0", tuple(rows))


def choose(found: AttentionTable | None, calls: dict[AttentionCase, float], head_dim: int = 128) -> AttentionChoice:
    return choose_backend("auto", "cuda", head_dim, calls, found)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    names = {"cudnn", "flash"}
    monkeypatch.setattr(select, "is_installed", names.__contains__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    return names


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_the_quickest_over_all_calls_is_chosen(installed: set[str]) -> None:
    installed.add("flash_attn_3")
    times = table(
        cudnn={OWN: 0.010, OTHER: 0.030}, flash={OWN: 0.020, OTHER: 0.040}, flash_attn_3={OWN: 0.012, OTHER: 0.020}
    )
    assert choose(times, {OWN: 1.0}).name == "cudnn"
    chosen = choose(times, {OWN: 1.0, OTHER: 1.5})  # 55, 80 and 42 ms
    assert chosen == AttentionChoice(
        "flash_attn_3",
        "measured 2026-01-31, forward and backward of causal, 32,768 tokens, heads of 128, bf16; full, 32,768 tokens, "
        "heads of 128, bf16: flash_attn_3 42 ms, cudnn 55 ms, flash 80 ms",
    )


def test_what_is_no_longer_installed_is_passed_over(installed: set[str]) -> None:
    times = table(cudnn={OWN: 0.010}, flash={OWN: 0.020}, te={OWN: 0.001})
    assert choose(times, {OWN: 1.0}).name == "cudnn"
    installed.remove("cudnn")
    assert choose(times, {OWN: 1.0}).name == "flash"


def test_the_rule_decides_where_a_case_was_not_measured(installed: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    only_own = table(cudnn={OWN: 0.010}, flash={OWN: 0.005})
    for found, calls in ((None, {OWN: 1.0}), (only_own, {OWN: 1.0, OTHER: 0.5}), (only_own, {})):
        chosen = choose(found, calls)
        assert chosen.name == "cudnn"
        assert chosen.reason.startswith("by compute capability 9.0; ") and "memo profile --attention" in chosen.reason
    partly = table(flash={OWN: 0.005, OTHER: 0.005}, cudnn={OWN: 0.001})
    assert choose(partly, {OWN: 1.0, OTHER: 1.0}).name == "flash"  # the one that was measured in both
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    assert choose(None, {OWN: 1.0}).name == "flash"


def test_only_deterministic_backends_are_eligible_where_that_is_asked(
    installed: set[str], deterministic: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed.add("flash_attn_3")
    times = table(cudnn={OWN: 0.001}, flash={OWN: 0.020}, flash_attn_3={OWN: 0.010})
    assert choose(times, {OWN: 1.0}).name == "flash_attn_3"
    assert choose(times, {OWN: 1.0}, head_dim=256).name == "flash"  # FlashAttention-3 is not, for such heads
    assert "use_deterministic_algorithms" in choose(times, {OWN: 1.0}).reason
    by_rule = choose(None, {})  # it would say cudnn
    assert by_rule.name == "flash" and "takes about 1.9 times as long as cudnn" in by_rule.reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    assert "takes about 3.8 times as long as cudnn" in choose(None, {}).reason
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    assert "times as long" not in choose(None, {}).reason
    with pytest.raises(ConfigError, match=r"'cudnn', whose gradients have the same bits each time never.*use 'auto'"):
        choose_backend("cudnn", "cuda", 128)
    with pytest.raises(ConfigError, match=r"'flash_attn_3'.*only for heads of up to 192, and heads are of 256"):
        choose_backend("flash_attn_3", "cuda", 256)
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert choose(times, {OWN: 1.0}).name == "cudnn"


def test_a_name_is_taken_as_it_is(installed: set[str]) -> None:
    times = table(cudnn={OWN: 0.010}, flash={OWN: 0.020})
    assert choose_backend("flash", "cuda", 128, {OWN: 1.0}, times) == AttentionChoice("flash", "--attention-backend")
    assert choose_backend("cpu", "cpu", 128) == AttentionChoice("cpu", "--attention-backend")
    assert choose_backend("auto", "cpu", 128) == AttentionChoice("cpu", "the one fused kernel of this device")
    with pytest.raises(ConfigError, match=r"'te', which needs CUDA"):
        choose_backend("te", "cpu", 128)


def test_what_is_installed_is_found_without_importing_it() -> None:
    assert is_installed("cudnn") and is_installed("flash")
    assert not is_installed("flash_attn_3") and not is_installed("flash_attn_4")

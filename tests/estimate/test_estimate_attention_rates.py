"""The time of a run follows the attention kernels that it asks for."""

import pytest

from memo.config import RunConfig
from memo.config.attention_kernels import flash_2_times
from memo.estimate.attention_rates import has_slow_attention, with_attention_of
from memo.estimate.cases import read_case
from memo.estimate.machines import find_hardware
from memo.search.estimating import answer
from memo.search.launch import run_of
from memo.search.planning import plan


def config(**flags: object) -> RunConfig:
    return RunConfig().override({"device": "cuda", **flags})


@pytest.mark.parametrize(
    ("machine", "flags", "times"),
    [
        ("h100-80", {}, 1.0),
        ("h100-80", {"deterministic": True}, 1.9),
        ("b200", {"deterministic": True}, 3.8),
        ("b300", {"attention_backend": "flash_attn"}, 3.8),
        ("h100-80", {"attention_backend": "flash"}, 1.9),
        ("rtx-pro-6000", {"attention_backend": "flash"}, 1.0),  # cuDNN drives its tensor cores the same way
        ("h100-80", {"attention_backend": "te", "deterministic": True}, 1.0),  # cuDNN's kernels, told to add in order
        ("a100-80", {"deterministic": True}, 1.0),  # FlashAttention 2 in any case
    ],
)
def test_attention_of_later_gpus_is_slower_under_flash_attention_2(
    machine: str, flags: dict[str, object], times: float
) -> None:
    hardware = find_hardware(machine)
    before, after = hardware.efficiency, with_attention_of(hardware, config(**flags)).efficiency
    assert before.attention_forward == pytest.approx(times * after.attention_forward)
    assert before.attention_backward == pytest.approx(times * after.attention_backward)
    assert before.matmul == after.matmul
    assert has_slow_attention(hardware, config(**flags)) == (times > 1)


def test_an_estimate_foresees_the_price() -> None:
    asked = {"model": "llama-3.1-8b", "seq_len": "262144", "tp": "8", "hardware": "h100-80", "alpha": "auto"}
    plain, repeated = (
        answer(read_case({**asked, "deterministic": text}, "a test"), is_timed=True).step for text in ("", "true")
    )
    assert plain is not None and repeated is not None
    attention_s = plain.seconds["attention"]
    assert repeated.seconds["attention"] == pytest.approx(flash_2_times(90) * attention_s, rel=0.01)
    assert repeated.step_time_s > plain.step_time_s + 0.8 * attention_s


def test_a_plan_asks_for_it_in_the_run() -> None:
    found = plan("llama-tiny", 2, hardware="h100-80", seq_len=2048, deterministic=True, top=1)
    assert found.best is not None
    assert run_of(found.question, found.best).hardware.deterministic

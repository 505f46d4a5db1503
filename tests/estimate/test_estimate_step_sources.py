"""step_sources.py: published steps of prime-rl beside what memo foresees, and each source left out."""

from collections.abc import Sequence

import pytest
import step_sources as benchmark

from memo.config.checks import check
from memo.config.hugging_face import model_of
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.time_errors import HOST_STEP_S

STEPS = {
    (step.run.hardware, step.run.model.split("-")[1], step.kind, step.seq_length // 1024): step
    for step in benchmark.prime_rl()
    if step.is_memos
}


def test_every_row_is_a_run_that_memo_accepts() -> None:
    assert len(benchmark.prime_rl()) == 17 and len(STEPS) == 7
    for run in (*(step.run for step in benchmark.prime_rl()), *benchmark.trl()):
        check(run.config, run.gpus, needs_data=False)


def test_tokens_a_second_of_rl_runs_count_what_happens_between_steps() -> None:
    """They save all weights there, whatever the length: 5 to 6 s of the 4B model. LoRA's and supervised runs do not."""
    for step in benchmark.prime_rl():
        if step.kind == "sft" or (step.lora and step.run.hardware != "a6000"):
            assert abs(step.between_s) < 0.03 * step.run.step_s
        elif step.run.model.endswith("4B-Instruct-2507") and not step.lora:
            assert 4.8 < step.between_s < 6
    assert len([step for step in benchmark.prime_rl() if step.between_s > 4.8]) == 3


@pytest.mark.parametrize("hardware", ["h100-80", "h200"])
def test_64k_tokens_are_foreseen_within_the_bar_with_and_without_what_is_not_memos(hardware: str) -> None:
    """A step of kind rl bears other work: without it, the step is shorter than foreseen."""
    row = STEPS[hardware, "4B", "rl", 64].row()
    assert -0.02 < row["longer"] < 0
    assert -row["bar"] < row["longer_of_memos"] < -0.09
    assert row["bar"] == pytest.approx(0.16, abs=0.01)
    in_tokens_a_second = (row["step_s"] + row["between_s"]) / row["foreseen_s"] - 1
    assert 0.17 < in_tokens_a_second < 0.2  # on H100 more than the bar: all weights are saved between two steps


LORA = {
    (step.run.hardware, step.run.gpus, step.recomputes): step.row()
    for step in benchmark.prime_rl()
    if step.lora and step.is_known
}


def test_all_five_steps_of_lora_are_foreseen_within_their_bars_without_what_is_not_memos() -> None:
    """By one reading, whatever the machine, the number of GPUs and where inputs of layers lie."""
    hopper = {("h100-80", 1, True), ("h100-80", 1, False), ("h100-80", 8, True), ("h200", 8, True)}
    assert set(LORA) == hopper | {("b200", 8, True)}
    for key, row in LORA.items():
        assert abs(row["longer_of_memos"]) < row["bar"], key
    assert all(-0.13 < LORA[key]["longer_of_memos"] < -0.1 for key in hopper)  # as those without LoRA
    assert all(0.06 < LORA[key]["longer"] < 0.09 for key in hopper)


def test_lora_on_b200_takes_half_as_long_again_with_what_is_not_memos() -> None:
    """A quarter of the published step is the RL run's and its four adapters', of which no figure is that of this step.
    With it, the step is off by twice the bar."""
    row = LORA["b200", 8, True]
    assert row["not_memos_s"] == pytest.approx(0.28 * row["step_s"], rel=0.02)
    assert 0.05 < row["longer_of_memos"] < row["bar"] < 0.28 < row["longer"]


def test_inputs_in_host_memory_take_the_time_that_one_gpu_with_the_link_for_itself_needs() -> None:
    """Two microbatches there and back, of all layers or of all but the last two: the rates that the pair says."""
    kept, moved = (LORA["h100-80", 1, recomputes]["step_s"] for recomputes in (True, False))
    gb_per_s = [2 * 2 * layers * 65536 * 2560 * 2 / (moved - kept) / 1e9 for layers in (34, 36)]
    assert gb_per_s == pytest.approx([48.0, 50.8], abs=0.1)
    assert gb_per_s[0] < HARDWARE["h100-80"].alone_gb_per_s < gb_per_s[1]


def test_flash_attention_2_on_b200_is_what_two_steps_without_lora_choose() -> None:
    """Foreseen 2 to 3 % too long; the RL run's other work is that of a pair on the same machine."""
    rows = [step.row() for step in benchmark.prime_rl() if step.run.hardware == "b200" and not step.lora]
    assert len(rows) == 2
    for row in rows:
        assert -0.04 < row["longer_of_memos"] < 0


def test_a_million_tokens_on_eight_h100() -> None:
    """7 % longer than foreseen; its bar is that of attention, which is all but all of it."""
    (run,) = benchmark.trl()
    assert run.longer() == pytest.approx(0.074, abs=0.01)
    assert run.bar() == pytest.approx(0.19, abs=0.01)


def test_a_small_model_of_few_tokens_takes_longer_by_seconds_that_tokens_do_not_explain() -> None:
    """0.6B on one H100: from 8K to 16K tokens, the seconds beyond what is foreseen hardly grow. So they come once a
    step: neither of kernels that grow with tokens, nor of a host that bounds the step at 8K, as it would not at 16K.
    At least so much belongs to the bar of every step of such a program."""
    rows = [STEPS["h100-80", "0.6B", "sft", length].row() for length in (8, 16)]
    left_s = [row["step_s"] - row["not_memos_s"] - row["foreseen_s"] for row in rows]
    constant_s = 2 * left_s[0] - left_s[1]
    assert left_s == pytest.approx([0.236, 0.271], abs=0.005)
    assert HOST_STEP_S - 0.02 < constant_s <= HOST_STEP_S
    for row in rows:
        assert row["bar"] * row["foreseen_s"] > HOST_STEP_S and row["longer_of_memos"] < row["bar"]


def test_attention_of_hopper_lies_between_what_published_steps_would_choose() -> None:
    """As a share of what cuDNN reaches alone; memo's own steps chose it."""
    h200 = HARDWARE["h200"]
    peak, hopper = h200.peak_tflops["bf16"], h200.efficiency
    shares = [hopper.attention_forward / (688 / peak), hopper.attention_backward / (581 / peak)]
    by_trl, by_prime = (benchmark.chosen_by(runs) for runs in (benchmark.trl(), benchmark.attention_steps()))
    assert shares == pytest.approx([0.77] * 2, abs=0.01) and by_trl < min(shares) < max(shares) < by_prime
    assert (by_trl, by_prime) == pytest.approx((0.71, 0.78), abs=0.01)


def test_each_source_left_out() -> None:
    """As docs/estimators.md says."""
    rows = {(row["source"], row["by"]): row["mean"] for row in benchmark.left_out()}
    assert rows["prime-rl, 64K", "TRL"] == pytest.approx(0.06, abs=0.01)
    assert rows["TRL, 1M", "prime-rl"] == pytest.approx(0.09, abs=0.01)
    assert rows["prime-rl and TRL", "cuDNN alone"] == pytest.approx(0.24, abs=0.01)
    assert rows["SimuMax, B200", "nothing of B200: Hopper's"] > rows["SimuMax, B200", "its kernels, not its steps"]
    assert {source for source, _ in rows} >= {"p4d 3", "p4d 4", "memo 3 memo", "memo 4"}


def test_attention_bars_hold_when_the_other_source_chooses() -> None:
    runs: Sequence[benchmark.Held]
    for runs, others in (
        (benchmark.trl(), benchmark.attention_steps()),
        (benchmark.attention_steps(), benchmark.trl()),
    ):
        efficiency = benchmark.with_attention(benchmark.chosen_by(others))
        assert all(abs(run.longer(efficiency)) < run.bar() for run in runs)


def test_models_are_those_of_the_published_configurations() -> None:
    common = {"model_type": "qwen3", "head_dim": 128, "vocab_size": 151936, "num_key_value_heads": 8}
    common |= {"tie_word_embeddings": True, "max_position_embeddings": 40960, "rope_theta": 1e6, "rms_norm_eps": 1e-6}
    small = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    large = {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    for (name, model), sizes in zip(benchmark._MODELS.items(), (small, large), strict=True):
        assert model == model_of(common | sizes, name), name

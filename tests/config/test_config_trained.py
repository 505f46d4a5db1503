"""Wrong choices of what is trained, through the real parser and the table of parameters: each message whole."""

import pytest

from memo.config.flags import load_run, parse_run
from memo.errors import ConfigError
from memo.spec.parameters import check_patterns_of

_TARGETS = "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj"
REFUSED = {
    "--freeze layers.* --train-only embedding.weight": (
        "--freeze layers.* fights with --train-only embedding.weight: each says what is trained; leave one of the two "
        "out"
    ),
    "--lora-alpha 32": "--lora-alpha 32.0 has no use where --lora-rank is 0: give --lora-rank 16, or leave it out",
    "--lora-rank 4 --lora-checkpoint there": (
        "--lora-checkpoint there has no use where --pretrained-checkpoint is not given: give --model DIR, or leave it "
        "out"
    ),
    "--lora-rank 4 --freeze layers.*": (
        "--freeze layers.* fights with --lora-rank 4: LoRA freezes the whole model, and --train-only says what is "
        "trained beside it; leave one of the two out"
    ),
    "--lora-rank 4 --custom-layer layers.py:Mine": (
        "--custom-layer layers.py:Mine fights with --lora-rank 4: that is for memo's own layer; leave one of the two "
        "out"
    ),
    **{
        f"--lora-rank 4 --lora-target-modules {words}": (
            f"--lora-target-modules is '{words}': give a string that is all-linear, or some of {_TARGETS} with commas "
            "between, or the default all-linear"
        )
        for words in ("q_proj,c_attn", "q_proj,,v_proj", "all-linear,q_proj")
    },
    "--lora-rank -1": "--lora-rank is -1: give a whole number from 0 to 65536, or the default 0",
    "--lora-rank 4 --lora-alpha -1": "--lora-alpha is -1.0: give a number from 0 to 1000000000, or the default 0.0",
}
"""Flags, and what is said of them."""
_LLAMA = "the model has embedding.weight, layers.0.attention_norm.weight, layers.0.attention.q.weight, ..."
_STAR = "* stands for any letters, as in layers.*.mlp.*"
NOT_BORNE_OUT = {
    "--model llama-tiny --freeze layers.9.*": f"--freeze layers.9.* matches no parameter: {_LLAMA}, ",
    "--model llama-tiny --freeze layers.0.*,nowhere": f"--freeze nowhere matches no parameter: {_LLAMA}, ",
    "--model llama-tiny --train-only layers.*.moe.*": f"--train-only layers.*.moe.* matches no parameter: {_LLAMA}, ",
    "--model llama-tiny --lora-rank 4 --train-only head": f"--train-only head matches no parameter: {_LLAMA}, ",
    "--model llama-tiny --freeze *.q.weight": (
        "--freeze trains layers.0.attention.k.weight and not layers.0.attention.q.weight, which memo has in one "
        "matrix: name both or neither"
    ),
    "--model llama-tiny --train-only *.gate.weight": (
        "--train-only trains layers.0.mlp.gate.weight and not layers.0.mlp.up.weight, which memo has in one matrix: "
        "name both or neither"
    ),
    "--model qwen3-moe-tiny --freeze layers.1.mlp.experts.2.*": (
        "--freeze trains layers.1.mlp.experts.0.gate.weight and not layers.1.mlp.experts.2.gate.weight, which memo has "
        "in one matrix: name both or neither"
    ),
    "--model llama-tiny --freeze *": "--freeze * leaves no parameter to train: freeze fewer",
    "--model gpt-tiny --lora-rank 4 --lora-target-modules gate_proj": (
        "--lora-target-modules gate_proj names gate_proj, and the model has no such matrix: give all-linear, or some "
        "of q_proj, k_proj, v_proj, o_proj, up_proj, down_proj"
    ),
    "--model gpt2-tiny --lora-rank 4 --lora-target-modules q_proj,gate_proj": (
        "--lora-target-modules q_proj,gate_proj names gate_proj, and the model has no such matrix"
    ),
}
"""Flags, and how the message about them begins, after the parameters of the model are known."""
ACCEPTED = [
    "--model llama-tiny --freeze embedding.weight,layers.[01].*",
    "--model llama-tiny --freeze layers.*.attention.[qkv].weight",
    "--model llama-tiny --train-only *norm.weight",
    "--model llama-tiny --lora-rank 4 --train-only embedding.weight",
    "--model gpt2-tiny --lora-rank 4 --lora-alpha 8 --lora-use-rslora --lora-target-modules q_proj,up_proj",
    "--model qwen3-moe-tiny --lora-rank 4 --lora-target-modules gate_proj",
    "--model qwen3.5-tiny --lora-rank 4 --lora-target-modules q_proj",
    "--model qwen3-moe-tiny --freeze layers.1.mlp.experts.*",
]


@pytest.mark.parametrize("flags", REFUSED)
def test_flags_that_fight_or_lack_others(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        load_run(["--mock-data", *flags.split()])
    captured = capsys.readouterr()
    assert (refused.value.code, captured.out) == (2, "")
    assert captured.err == f"error: {REFUSED[flags]}\n"


@pytest.mark.parametrize("flags", NOT_BORNE_OUT)
def test_names_that_the_model_does_not_bear_out(flags: str) -> None:
    config = load_run(["--mock-data", "--vocab-size", "61", *flags.split()])
    with pytest.raises(ConfigError) as refused:
        check_patterns_of(config)
    assert str(refused.value).startswith(NOT_BORNE_OUT[flags]) and "\n" not in str(refused.value)
    assert "matches no" not in str(refused.value) or str(refused.value).endswith(f"final_norm.weight; {_STAR}")


@pytest.mark.parametrize("flags", ACCEPTED)
def test_accepted(flags: str) -> None:
    check_patterns_of(load_run(["--mock-data", "--vocab-size", "61", *flags.split()]))


@pytest.mark.parametrize(
    "flags", ["--freeze nowhere", "--lora-rank 4 --lora-target-modules gate_proj --model gpt-tiny"]
)
def test_a_run_is_refused_before_its_model_is_made(flags: str) -> None:
    from memo.train.setup import prepare

    config = parse_run(["--mock-data", "--vocab-size", "61", "--device", "cpu", *flags.split()], prog="test")
    with pytest.raises(ConfigError, match=r"matches no parameter|has no such matrix"):
        prepare(config)

"""Flags of swapping and recomputation: what they mean, and what is refused with which message."""

from pathlib import Path

import pytest

from memo.config import RunConfig
from memo.config.checks import check
from memo.config.derived import resolved_memory_planner
from memo.config.flags import parse_run
from memo.config.run import read_toml
from memo.errors import ConfigError

WRONG = [
    ("--offload-alpha 1.5", ("--offload-alpha is 1.5", "from 0 to 1, or the default auto", 'one of "off", "auto"')),
    ("--offload-alpha -0.1", ("--offload-alpha is -0.1", "a number from 0 to 1")),
    ("--offload-alpha nan", ("--offload-alpha is nan", "a number from 0 to 1")),
    ("--offload-alpha inf", ("--offload-alpha is inf", "a number from 0 to 1")),
    (
        "--offload-alpha 0.5 --recompute-granularity full",
        ("--recompute-granularity full", "--offload-alpha 0.5", "use --offload-alpha off", "none"),
    ),
    (
        "--offload-alpha 0 --recompute-granularity selective",
        ("--recompute-granularity selective", "--offload-alpha 0.0"),
    ),
    ("--offload-alpha 1 --offload-tiles 0", ("--offload-tiles is 0: give a whole number from 1 to ",)),
    ("--offload-alpha 1 --offload-host-memory-gib 0", ("--offload-host-memory-gib is 0.0", "above 0")),
    ("--offload-alpha 1 --offload-host-memory-gib nan", ("--offload-host-memory-gib is nan", "finite")),
    (
        "--offload-alpha 0.5 --seq-length 1004",
        ("--seq-length 1004", "--tp 1 x --offload-tiles 8 = 8", "1000 or 1008", "smaller --offload-tiles"),
    ),
    (
        "--offload-alpha 0.5 --seq-length 1040 --cp 2 --tp 2",
        ("--seq-length 1040", "2 x --cp 2 x --tp 2 x --offload-tiles 8 = 64", "1024 or 1088"),
    ),
    (
        "--offload-alpha auto --offload-backend cuda --device cpu",
        ("--offload-backend cuda", "--device cpu", "virtual or threads"),
    ),
    (
        "--offload-alpha auto --offload-backend virtual --device cuda",
        ("--offload-backend virtual", "--device cuda", "auto or cuda"),
    ),
    ("--offload-alpha auto --offload-backend threads --device cuda", ("--offload-backend threads", "--device cuda")),
    ("--offload-alpha auto --offload-check-races --device cuda", ("--offload-check-races", "--device cuda")),
    (
        "--offload-granularity tile --offload-slot-tiles 3",
        ("--offload-slot-tiles 3", "--offload-tiles 8 does not divide", "--offload-slot-tiles 1", "6 or 9"),
    ),
    (
        "--offload-granularity tile --recompute-attention-layers 9",
        (
            "--recompute-attention-layers 9 is above",
            "layers of a pipeline chunk: give ",
        ),
    ),
    (
        "--offload-granularity tile --recompute-attention-layers -1",
        ("--recompute-attention-layers is -1", "give a whole number from 0 to "),
    ),
    (
        "--offload-granularity tile --offload-slot-tiles 0",
        ("--offload-slot-tiles is 0: give a whole number from 1 to ",),
    ),
    (
        "--offload-granularity tile --cp 2",
        ("--cp 2", "--cp-comm-type p2p", "--cp-comm-type all_gather or a2a", "--offload-granularity layer"),
    ),
    (
        "--offload-granularity tile --seq-length 1004",
        ("--seq-length 1004", "--tp 1 x --offload-tiles 8 = 8", "1000 or 1008"),
    ),
    (
        "--offload-alpha off --offload-backend threads",
        ("--offload-backend threads has no use", "give --offload-alpha auto, or"),
    ),
    (
        "--offload-states all --optimizer-offload-fraction 0.5 --weight-offload-fraction 0.75",
        ("--weight-offload-fraction 0.75 is above --optimizer-offload-fraction 0.5", "give as much or less"),
    ),
    (
        "--memory-planner auto --memory-planner-min-bytes 0",
        ("--memory-planner-min-bytes is 0: give a whole number from 1 to ",),
    ),
    (
        "--memory-planner off --memory-planner-min-bytes 64 --device cuda",
        ("--memory-planner-min-bytes 64", "--memory-planner is off", "give --memory-planner auto"),
    ),
    (
        "--memory-planner-min-bytes 64 --device cpu",
        ("--memory-planner-min-bytes 64", "--memory-planner is off (the default on a CPU)"),
    ),
]

RIGHT = [
    "--offload-alpha off",
    "--offload-alpha off --recompute-granularity full",
    "--offload-alpha off --seq-length 1001",
    "--offload-alpha 0",
    "--offload-alpha 1 --offload-policy paper",
    "--offload-alpha 0.5 --offload-tiles 5 --seq-length 1000",
    "--offload-alpha 0.5 --seq-length 1088 --cp 2 --tp 2",
    "--offload-alpha auto --offload-backend virtual --offload-check-races",
    "--offload-alpha off --profile-cache cache",
    "--layer-profile p.json --profile-cache off",
    "--offload-alpha auto --offload-backend cuda --device cuda",
    "--offload-alpha auto --offload-backend threads --device cpu --offload-host-memory-gib 0.5",
    "--memory-planner-min-bytes 64",
    "--memory-planner-min-bytes 64 --device cuda",
    "--memory-planner-min-bytes 64 --device cpu --memory-planner flat",
]


def parsed(flags: str) -> RunConfig:
    return parse_run([*flags.split(), "--mock-data"], prog="memo train")


@pytest.mark.parametrize(("flags", "says"), WRONG)
def test_wrong_flags_are_refused_by_name_values_and_remedy(flags: str, says: tuple[str, ...]) -> None:
    config = parsed(flags)
    with pytest.raises(ConfigError) as caught:
        check(config, config.parallel.model_ranks)
    for part in says:
        assert part in str(caught.value)


@pytest.mark.parametrize("name", ["profile_cache", "layer_profile", "offload_nvme_path"])
def test_paths_that_are_empty_are_refused_in_files_and_python_too(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '': give a string that is not empty"):
        RunConfig().override({name: "", "mock_data": True})


@pytest.mark.parametrize("flags", RIGHT)
def test_right_flags_pass(flags: str) -> None:
    config = parsed(flags)
    check(config, config.parallel.model_ranks)


@pytest.mark.parametrize(
    ("word", "value"), [("off", "off"), ("auto", "auto"), ("0", 0.0), ("1", 1.0), ("0.125", 0.125)]
)
def test_alpha_is_a_word_or_a_number_and_survives_toml(word: str, value: str | float, tmp_path: Path) -> None:
    config = parsed(f"--offload-alpha {word}")
    assert config.memory.offload_alpha == value and type(config.memory.offload_alpha) is type(value)
    assert config.memory.swaps == (word != "off")
    (tmp_path / "run.toml").write_text(config.to_toml())
    assert RunConfig().override(read_toml(tmp_path / "run.toml")) == config


def test_an_alpha_that_is_neither_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parsed("--offload-alpha most")
    assert caught.value.code == 2
    assert "--offload-alpha" in capsys.readouterr().err
    for value in ("most", True):
        with pytest.raises(ConfigError, match=r"offload_alpha is .*\"off\", \"auto\" or a number"):
            RunConfig().override({"offload_alpha": value})


@pytest.mark.parametrize(
    ("flags", "on_cuda", "on_cpu"),
    [
        ("", "auto", "off"),
        ("--memory-planner off", "off", "off"),
        ("--data-path c", "auto", "off"),
        ("--data-path c --no-packing", "auto", "off"),
        ("--data-path c --memory-planner flat", "flat", "flat"),
    ],
)
def test_memory_is_planned_by_default_on_cuda(flags: str, on_cuda: str, on_cpu: str) -> None:
    config = parsed(flags)
    assert (resolved_memory_planner(config, "cuda"), resolved_memory_planner(config, "cpu")) == (on_cuda, on_cpu)
    assert config.memory.plans == (on_cpu != "off")  # the default is not known yet
    assert config.override({"memory_planner": on_cuda}).memory.plans == (on_cuda != "off")

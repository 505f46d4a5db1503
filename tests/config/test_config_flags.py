"""The parser: precedence, spellings, nearest names, TOML files, and who prints what."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from memo.config import PRESETS, RunConfig, preset
from memo.config.checks import check
from memo.config.flags import load_run, parse_run
from memo.config.memory import MemoryConfig
from memo.config.presets import listed
from memo.config.run import read_toml
from memo.errors import ConfigError


def refusal(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What standard error says when `argv` is refused with status 2."""
    with pytest.raises(SystemExit) as refused:
        parse_run(argv, prog="memo train")
    assert refused.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def toml(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    return path


def test_defaults_below_preset_below_toml_below_flags(tmp_path: Path) -> None:
    path = toml(tmp_path, "[model]\nnum_layers = 6\nhidden_size = 2048\n[data]\nseq_length = 256\n")
    argv = ["--config", str(path), "--model", "gpt-7b", "--num-layers", "2"]
    config = parse_run(argv, prog="memo train")
    assert config.model == dataclasses.replace(preset("gpt-7b"), num_layers=2, hidden_size=2048)
    assert config.data.seq_length == 256
    assert config.training == RunConfig().training


def test_flags_and_keys_that_said_gb_and_meant_gib_still_work(tmp_path: Path) -> None:
    path = toml(tmp_path, "[memory]\noffload_host_memory_gb = 64.0\n")
    memory = parse_run(["--config", str(path), "--device-memory-gb", "40"], prog="memo train").memory
    assert (memory.offload_host_memory_gib, memory.device_memory_gib) == (64.0, 40.0)


def test_numbers_in_files_and_python_may_be_written_as_on_the_command_line(tmp_path: Path) -> None:
    path = toml(tmp_path, 'seq_length = "128K"\ntrain_iters = "2K"\nmemory_planner_min_bytes = "64KiB"\n')
    config = parse_run(["--config", str(path), "--gbs", "1K"], prog="memo train")
    assert (config.data.seq_length, config.training.train_iters, config.training.global_batch_size) == (
        131072,
        2000,
        1000,
    )
    assert config.memory.memory_planner_min_bytes == 65536
    assert RunConfig().override({"seq_len": "1M"}).data.seq_length == 1 << 20


def test_a_flag_takes_the_place_of_a_length_in_the_other_unit(tmp_path: Path) -> None:
    path = toml(tmp_path, "train_iters = 350\n")
    training = parse_run(["--config", str(path), "--num-epochs", "2"], prog="memo train").training
    assert (training.num_epochs, training.train_iters) == (2, 100)


@pytest.mark.parametrize(
    ("file", "flags", "left"),
    [
        ("mock_data = true", "--data-path a", {"data_path": ("a",), "mock_data": False}),
        ('data_path = "a"\nnum_epochs = 1', "--mock-data", {"data_path": None, "mock_data": True}),
        ('data_path = "a"\nsplit = "9,1"', "--eval-data-path b", {"eval_data_path": ("b",), "split": None}),
        ('data_path = "a"\neval_data_path = "b"', "--split 9,1", {"eval_data_path": None, "split": "9,1"}),
    ],
)
def test_a_flag_takes_the_place_of_other_data(file: str, flags: str, left: dict[str, Any], tmp_path: Path) -> None:
    argv = ["--config", str(toml(tmp_path, f"{file}\n")), *flags.split(), "--eval-interval", "1"]
    config = parse_run(argv, prog="memo train")
    assert {name: getattr(config.data, name) for name in left} == left
    assert config.training.num_epochs is None


def test_preset_named_in_toml_yields_to_the_flag(tmp_path: Path) -> None:
    path = toml(tmp_path, 'model = "gpt-7b"\nseq-length = 64\n')
    assert parse_run(["--config", str(path)], prog="memo train").model == preset("gpt-7b")
    named = parse_run(["--config", str(path), "--model=llama-tiny"], prog="memo train")
    assert named.model == preset("llama-tiny")
    assert named.data.seq_length == 64


def test_short_forms_underscores_and_megatron_spellings() -> None:
    long = "--seq-length 64 --tensor-model-parallel-size 2 --global-batch-size 8 --params-dtype bf16"
    long += " --norm-epsilon 1e-6 --activation swiglu --no-add-bias-linear --no-packing"
    short = "--seq_len=64 --tp 2 --gbs 8 --bf16 --layernorm-epsilon 1e-6 --swiglu --disable-bias-linear --no-packing"
    assert parse_run(short.split(), prog="a") == parse_run(long.split(), prog="a")


def test_an_unknown_preset_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["--model", "x"], capsys)
    assert listed() in message


@pytest.mark.parametrize("name", ["none.toml", "."])
def test_a_config_that_cannot_be_read(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(["--config", str(tmp_path / name)], capsys)
    assert str(tmp_path / name) in message and "give the path of a TOML file" in message


@pytest.mark.parametrize("name", PRESETS)
def test_toml_round_trip_of_presets(name: str, tmp_path: Path) -> None:
    config = RunConfig(model=preset(name))
    path = toml(tmp_path, config.to_toml())
    assert RunConfig().override(read_toml(path)) == config
    assert parse_run(["--config", str(path)], prog="memo train") == config


def test_toml_round_trip_of_awkward_values(tmp_path: Path) -> None:
    config = RunConfig().override(
        {
            "save": 'a "quoted"\\path\nwith\ttabs, é and \x7f',
            "lr": 1e-30,
            "adam_eps": 1e22,
            "weight_decay": 0,
            "packing": False,
            "gbs": 64,
            "params_dtype": "bf16",
        }
    )
    assert RunConfig().override(read_toml(toml(tmp_path, config.to_toml()))) == config


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"seq_lenght": 4}, "Trainer: there is no field 'seq_lenght': did you mean 'seq_length'"),
        ({"tp": 1, "tensor_model_parallel_size": 2}, "given twice (1, 2)"),
        ({"tp": "2"}, "Trainer: tensor_model_parallel_size is '2' (a string): give a whole"),
        ({"learning_rate": 1e-4}, "Trainer: there is no field 'learning_rate': memo calls it lr"),
        ({"tensor_parallel_size": 2}, "memo calls it tensor_model_parallel_size, in short tp"),
        ({"offload_alpha": "most"}, 'give one of "off", "auto" or a number'),
        ({"offload_alpha": True}, 'give one of "off", "auto" or a number'),
        *(
            ({name: ""}, f"{name} is '': give a string")
            for name in ("profile_cache", "layer_profile", "offload_nvme_path", "save", "load", "pretrained_checkpoint")
        ),
    ],
    ids=str,
)
def test_bad_values_in_python(values: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as refused:
        RunConfig().override(values, source="Trainer")
    assert says in str(refused.value)


@pytest.mark.parametrize("argv", [["--tpp", "2"], ["--lr", "x"], ["--config", "nowhere"], ["--lr", "-1"], []])
def test_other_ranks_are_silent(
    argv: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "torchrun sets it")
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pytest.raises(SystemExit) as refused:
        load_run(argv)
    assert refused.value.code == 2
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("LOCAL_RANK", "0")
    with pytest.raises(SystemExit):
        load_run(argv)
    assert capsys.readouterr().err


def test_help_tells_flags_presets_and_their_values(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse_run(["--model", "gpt-7b", "--help-all"], prog="memo train")
    assert stopped.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--model NAME|DIR" in text and "llama-3.1-8b" in text
    assert "--hidden-size INT Width h of the residual stream. (default: 4096)" in text


def test_a_flag_takes_along_what_the_preset_has_for_it_alone() -> None:
    """The factor of a scaling that is turned off was none of the user's, so it is no mistake of theirs."""
    plain = parse_run(["--model", "llama-3.1-8b", "--rope-scaling-type", "none", "--mock-data"], prog="memo train")
    check(plain, 1)
    assert plain.model == dataclasses.replace(preset("llama-3.1-8b"), rope_scaling_type="none", rope_scaling_factor=1.0)
    dense = RunConfig(model=preset("qwen3-moe-tiny")).override({"num_experts": 0, "mock_data": True})
    check(dense, 1)
    with pytest.raises(ConfigError, match=r"--rope-scaling-factor 4.0 has no use where --rope-scaling-type is none"):
        check(plain.override({"rope_scaling_factor": 4.0}), 1)


def test_a_flag_takes_along_what_the_file_has_for_it_alone(tmp_path: Path) -> None:
    """As `memo evaluate --load RUN --offload-alpha off`, of a run with tiles of its own."""
    (file := tmp_path / "run.toml").write_text(
        'model = "qwen3-moe-tiny"\nmock_data = true\noffload_alpha = 0.5\noffload_tiles = 4\n'
        'offload_policy = "paper"\nmoe_aux_loss_coeff = 0.1\noffload_host_memory_gib = 2\n'
        'memory_planner = "flat"\nmemory_planner_from = "rehearsal"\n'
    )
    given = ["--config", str(file), "--offload-alpha", "off", "--num-experts", "0", "--memory-planner", "off"]
    config = parse_run(given, prog="memo train")
    check(config, 1)
    assert config.memory == MemoryConfig(offload_alpha="off", memory_planner="off")
    assert config.training.moe_aux_loss_coeff == 0.0
    with pytest.raises(ConfigError, match=r"--offload-tiles 4 has no use where --offload-alpha is off"):
        check(parse_run([*given, "--offload-tiles", "4"], prog="memo train"), 1)

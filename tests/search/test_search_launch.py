"""What is written is what `memo train --config` runs, and the command starts it."""

import json
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from memo.config.checks import check
from memo.config.derived import resolved_lr, resolved_lr_warmup_iters
from memo.config.flags import parse_run
from memo.errors import ConfigError, ResourceError
from memo.estimate.admission import Room, admit
from memo.search.candidates import AUTO, FULL, GRID, KEEP, Layout, config_of
from memo.search.launch import command, run_of, write_run
from memo.search.planning import plan
from memo.search.question import ask
from memo.search.ranking import evaluate, search
from memo.units import GIB

SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512}
SIZES |= {"vocab_size": 1000, "max_position_embeddings": 4096, "num_key_value_heads": 2}


@pytest.mark.parametrize("strategy", [KEEP, FULL, AUTO, GRID[2]])
def test_the_file_is_the_run(strategy: object, tmp_path: Path) -> None:
    question = ask("llama-3.1-8b", 16, seq_len=1 << 17, hardware="h100-80", host_memory_gib=1000)
    choice = evaluate(question, Layout(2, 2, 2, 2, 1, "all_gather"), strategy)  # type: ignore[arg-type]
    path = tmp_path / "run.toml"
    write_run(question, choice, str(path), data_path=("data/mine",))
    read = parse_run(["--config", str(path)], prog="memo train")
    assert read == run_of(question, choice, ("data/mine",))
    check(read, 16)
    assert replace(read.parallel) == config_of(question, choice.layout).parallel
    assert (read.data.seq_length, read.data.data_path, read.training.global_batch_size) == (1 << 17, ("data/mine",), 16)
    swaps = choice.strategy.swaps
    assert read.memory.offload_host_memory_gib == (900.0 if swaps else None)
    assert f"MFU {choice.step.mfu_percent:.1f} %" in path.read_text()


def test_host_memory_is_free_where_nobody_bounds_it() -> None:
    question = ask("gpt-7b", 8, seq_len=1 << 18, global_batch_size=16)
    assert run_of(question, evaluate(question, Layout(4, 2), AUTO)).memory.offload_host_memory_gib is None


@pytest.mark.parametrize(
    ("changes", "flags", "rate"),
    [({"lora_rank": 8}, "", "5e-06"), ({}, "--reference-log-probs REFERENCE ", "5e-07")],
)
def test_a_run_on_pairs_of_answers(changes: dict[str, int], flags: str, rate: str) -> None:
    """A step takes an even number of sequences, and all weights need the reference's log-probs in a file."""
    found = plan("llama-3.2-1b", 1, seq_len=8192, hardware="h100-80", preference="dpo", top=1, **changes)
    assert found.question.global_batch_size == 2 and f"--lr {rate} " in found.question.weights_text
    assert found.best is not None
    line = command(found.question, found.best)
    assert " --preference dpo " in line and f" {flags}--data-path DATA " in line
    with pytest.raises(ConfigError, match="--global-batch-size is 3: give an even number"):
        ask("llama-3.2-1b", 1, global_batch_size=3, preference="dpo", lora_rank=8)


def test_steps_of_hours_are_admitted() -> None:
    question = ask("gpt-7b", 8, seq_len=1 << 20, global_batch_size=64)
    choice = evaluate(question, Layout(4, 2), AUTO)
    minutes = run_of(question, choice).training.max_step_minutes
    assert 4 * choice.step.step_time_s / 60 <= minutes < 4 * choice.step.step_time_s / 60 + 1
    assert minutes > 60


def test_a_vocabulary_of_the_data_stays_open() -> None:
    """Tiny presets take the tokenizer's: memory is that of bytes, the run names none."""
    question = ask("llama-tiny", 2, seq_len=1024)
    best = search(question).best
    assert best is not None
    assert question.model.sizes.vocab_size == 257 and run_of(question, best).model.vocab_size is None


def test_a_run_starts_from_the_weights_beside_the_config_also_before_they_are_there(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": "llama", "rope_theta": 5e5, **SIZES}))
    for has_weights in (False, True):
        if has_weights:
            (tmp_path / "model.safetensors").write_bytes(b"")
            says = "; by default --lr 1e-05 after a warm-up of 1/10 of the steps"
        else:
            says = ", which has none yet: before training, download it with `hf download "
        for name in (tmp_path, file):
            question = ask(str(name), 2, seq_len=1024)
            assert question.weights_text.startswith(f"weights: from {tmp_path}{says}")
            run = run_of(question, evaluate(question, Layout(2), KEEP))
            assert run.checkpoint.pretrained_checkpoint == str(tmp_path)
            assert tomllib.loads(run.to_toml())["model"]["rotary_base"] == 5e5
            assert (resolved_lr(run), resolved_lr_warmup_iters(run)) == (1e-5, 10)
    adapters = ask(str(file), 2, seq_len=1024, lora_rank=4)
    assert adapters.weights_text.endswith("; by default --lr 0.0001 after a warm-up of 1/10 of the steps")
    run = run_of(adapters, evaluate(adapters, Layout(2), KEEP))
    assert (resolved_lr(run), resolved_lr_warmup_iters(run)) == (1e-4, 10)


def test_a_shape_without_a_model_directory_starts_from_new_weights(tmp_path: Path) -> None:
    (tmp_path / "shape.json").write_text(json.dumps({"model_type": "llama", "rope_theta": 5e5, **SIZES}))
    for name in ("llama-3.1-8b", str(tmp_path / "shape.json")):
        question = ask(name, 8, seq_len=1024, hardware="h100-80")
        path = tmp_path / "run.toml"
        write_run(question, evaluate(question, Layout(2, 4), KEEP), str(path))
        run = parse_run(["--config", str(path)], prog="memo train")
        assert run.checkpoint.pretrained_checkpoint is None
        assert (resolved_lr(run), resolved_lr_warmup_iters(run)) == (3e-4, 1)
        rate = "--lr 0.0003 after a warm-up of 1/100 of the steps"
        assert question.weights_text == f"weights: new; by default {rate}"
        assert f"# Unless given: {rate}.\n" in path.read_text()


def test_one_node_and_several() -> None:
    one, four, three = (ask("gpt-7b", gpus, hardware="h100-80") for gpus in (8, 32, 3))
    choice = evaluate(one, Layout(8), KEEP)
    assert command(one, choice, "a.toml") == (
        "torchrun --nproc-per-node 8 -m memo train --config a.toml --data-path DATA --save RUN --load RUN"
    )
    assert command(three, choice, "a.toml", "d").startswith(
        "torchrun --nproc-per-node 3 -m memo train --config a.toml --save"
    )
    assert command(four, choice, "a.toml", "d") == (
        "torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint FIRST_NODE:29500 "
        "-m memo train --config a.toml --save RUN --load RUN"
    )


@pytest.mark.parametrize("strategy", [KEEP, FULL, AUTO, GRID[2]])
@pytest.mark.parametrize("model", ["preset", "config.json", "shape.json", "weights"])
def test_without_a_file_the_command_has_the_whole_run(model: str, strategy: object, tmp_path: Path) -> None:
    values = {**SIZES, "hidden_size": 384}
    folder = tmp_path / "a model"
    folder.mkdir()
    config = folder / ("shape.json" if model == "shape.json" else "config.json")
    config.write_text(json.dumps({"model_type": "llama", "rope_theta": 5e5, **values}))
    if model == "weights":
        (folder / "model.safetensors").write_bytes(b"")
    name = {"preset": "llama-3.1-8b", "shape.json": str(config)}.get(model, str(folder))
    machine: dict[str, Any] = {"hardware": "h100-80", "host_memory_gib": 1000}
    question = ask(name, 16, seq_len=4096, **machine, clip_grad=0.0, exp_avg_dtype="bf16", exp_avg_sq_dtype="bf16")
    choice = evaluate(question, Layout(2, 2, 2, 2, 1, "all_gather"), strategy)  # type: ignore[arg-type]
    words = shlex.split(command(question, choice, data_path=("0.7", "my data", "0.3", "b")))
    assert words[-4:] == ["--save", "RUN", "--load", "RUN"]
    assert ("--hidden-size" in words) == (model == "shape.json")
    read = parse_run([*words[words.index("train") + 1 : -4], "--device", "cuda"], prog="memo train")
    assert read == run_of(question, choice, ("0.7", "my data", "0.3", "b"))


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    question = ask("gpt-7b", 8, seq_len=2048)
    with pytest.raises(ConfigError, match=f"--out {tmp_path} could not be written .*: check the path, its permissions"):
        write_run(question, evaluate(question, Layout(8), KEEP), str(tmp_path))


@pytest.mark.parametrize(
    ("model", "gpus", "seq_len", "batch", "hardware"),
    [
        ("gpt-7b", 8, 1 << 19, 16, "a800-80"),
        ("gpt-7b", 8, 3027 << 10, 16, "a800-80"),
        ("llama-3.1-8b", 8, 8192, 64, "h100-80"),
        pytest.param("llama-3.1-70b", 64, 8192, 128, "h100-80", marks=pytest.mark.full),
    ],
)
def test_what_is_planned_is_admitted(model: str, gpus: int, seq_len: int, batch: int, hardware: str) -> None:
    """By the check that every run meets before it starts, on a device of which CUDA itself has taken 0.5 GiB."""
    question = ask(model, gpus, seq_len=seq_len, global_batch_size=batch, hardware=hardware)
    best = search(question, top=1).best
    assert best is not None
    run, free = run_of(question, best), int((0.985 * 80 - 0.5) * GIB)
    peak = question.hardware.peak_flops("bf16")
    admission = admit(run, gpus, Room(free, free), peak)
    assert admission.worst_rank.total <= best.sized.memory.total
    with pytest.raises(ResourceError, match=r"is too large .* rounding_buffers .* available are"):
        admit(run, gpus, Room(admission.worst_rank.total - 1, admission.worst_rank.total - 1), peak)

"""Where states live is no part of a run: checkpoints, weights from outside, evaluation and planned memory agree."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_equal_bits, contents
from hf_directories import write_model
from ranks import run_ranks
from streamed_steps import states_of
from trainers import QUIET, SMALL_RUN, tiny_trainer

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.checkpoint.hugging_face.exporter import export_checkpoint
from memo.cli.main import main
from memo.data import build_corpus

STEPS = 2
ALL: dict[str, Any] = {"offload_states": "all"}
OPTIMIZER: dict[str, Any] = {"offload_states": "optimizer"}
HALF: dict[str, Any] = {**ALL, "optimizer_offload_fraction": 0.5}
NONE: dict[str, Any] = {"offload_states": "none"}
ZERO3: dict[str, Any] = {"data_parallel_sharding_strategy": "optim_grads_params"}


def trainer(**overrides: Any) -> memo.Trainer:
    values = {"num_layers": 4, "lr_decay_iters": 2 * STEPS, "lr_warmup_iters": 1, "global_batch_size": 2}
    return tiny_trainer(**{**values, "params_dtype": "bf16", "train_iters": 2 * STEPS, **overrides})


def parts_of_one_run(
    layout: dict[str, Any], source: dict[str, Any], target: dict[str, Any], folder: Path
) -> list[list[tuple[float, float]]]:
    """Figures of: six resident steps; three under one placement; the other three under another one."""
    found = []
    for name, train_iters, placement in (("whole", 2 * STEPS, NONE), ("parts", STEPS, source), ("parts", None, target)):
        save = {"save": str(folder / name), "load": str(folder / name), "async_save": name == "parts"}
        stop = {} if train_iters is None else {"train_iters": train_iters}
        with trainer(**layout, **save, **stop, **placement) as run:
            assert (run.parts.states is not None) == (placement != NONE)
            records = []
            run.callbacks.append(records.append)
            run.train()
        found.append([(record.lm_loss, record.grad_norm) for record in records])
    return found


CASES: dict[str, tuple[int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "all, then none": (1, {}, ALL, NONE),
    "none, then all": (1, {}, NONE, ALL),
    "half, then the optimizer, swapped": (1, {"offload_alpha": 0.5, "offload_tiles": 4}, HALF, OPTIMIZER),
    "dp2: all under ZeRO-3, then none": (2, {}, {**ALL, **ZERO3}, NONE),
    "dp2: optimizer, then ZeRO-3": (2, {}, OPTIMIZER, ZERO3),
    "pp2: all, then half": (2, {"pp": 2}, ALL, HALF),
}


IN_FULL = {"none, then all", "dp2: all under ZeRO-3, then none"}
"""The same placements in the other order."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.full] * (name in IN_FULL)) for name in CASES])
def test_a_run_goes_on_under_another_placement_to_the_last_bit(name: str, tmp_path: Path) -> None:
    world_size, layout, source, target = CASES[name]
    ranks = run_ranks(world_size, parts_of_one_run, layout, source, target, tmp_path)
    whole, first, second = ranks[0]
    assert len(first) == len(second) == STEPS
    assert first + second == whole
    assert_equal_bits(latest_checkpoint(tmp_path / "parts"), latest_checkpoint(tmp_path / "whole"))


def first_step(make: Callable[..., memo.Trainer], placements: list[dict[str, Any]]) -> list[Any]:
    """Masters as each placement begins with them, and the figures of its first step."""
    found = []
    for placement in placements:
        with make(**placement) as run:
            states, record = states_of(run.parts), run.step()
            found.append((states, record.lm_loss, record.grad_norm))
    return found


def assert_all_equal(found: list[Any]) -> None:
    (expected, *figures), *others = found
    for states, *theirs in others:
        assert theirs == figures
        assert states.keys() == expected.keys()
        assert all(torch.equal(states[name], value) for name, value in expected.items())


def test_a_checkpoint_of_two_ranks_goes_on_alone_in_any_placement(tmp_path: Path) -> None:
    run_ranks(2, save_some, tmp_path)
    saved = contents(latest_checkpoint(tmp_path))[1]
    found = run_ranks(1, first_step, partial(trainer, load=str(tmp_path)), [NONE, ALL, HALF])[0]
    assert_all_equal(found)
    # One rank holds whole tensors, if not in the shape and under the names of the checkpoint.
    ours = sum(value.double().square().sum() for value in found[1][0].values())
    theirs = sum(value.double().square().sum() for value in saved.values())
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-12)


def save_some(folder: Path) -> None:
    with trainer(**ALL, **ZERO3, save=str(folder), train_iters=STEPS) as run:
        run.train()


def test_weights_of_hugging_face_come_in_and_go_out_the_same(tmp_path: Path) -> None:
    model = write_model("llama", tmp_path)
    placements = [NONE, ALL, HALF, {**ALL, "offload_weight_copy": False}]
    assert_all_equal(run_ranks(1, first_step, partial(of_directory, model), placements)[0])
    for name in ("resident", "streamed"):
        run_ranks(1, import_and_save, model, tmp_path / name, ALL if name == "streamed" else NONE)
        export_checkpoint(tmp_path / name, tmp_path / f"{name}-out")
    files = [(tmp_path / f"{name}-out" / "model.safetensors").read_bytes() for name in ("resident", "streamed")]
    assert files[0] == files[1]


def of_directory(model: Path, **overrides: Any) -> memo.Trainer:
    values = {"mock_data": True, "seq_length": 64, "global_batch_size": 2, "train_iters": 2, "lr": 1e-2}
    values |= {"device": "cpu", "offload_alpha": "off", "params_dtype": "bf16"}
    return memo.Trainer(str(model), **{**QUIET, **values, **overrides})


def import_and_save(model: Path, folder: Path, placement: dict[str, Any]) -> None:
    with of_directory(model, save=str(folder), **placement) as run:
        run.train()


def test_evaluate_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(
        "All happy families are alike; each unhappy one is unhappy in its own way.\n" * 60
    )
    build_corpus([tmp_path / "text.txt"], tmp_path / "corpus")
    shape = ["--num-layers", "4", "--hidden-size", "32", "--seq-len", "64", "--global-batch-size", "2"]
    flags = {**SMALL_RUN, "num_layers": 4, "global_batch_size": 2, "train_iters": 2, "offload_alpha": "off", **ALL}
    with memo.Trainer("llama-tiny", train_data=tmp_path / "corpus", save=str(tmp_path / "run"), **flags) as run:
        run.train()
    told = []
    for index, flags in enumerate(([], ["--offload-states", "all"], ["--offload-states", "optimizer"])):
        out = tmp_path / f"{index}.json"
        words = ["evaluate", "--model", "llama-tiny", *shape, "--load", str(tmp_path / "run"), "--eval-iters", "2"]
        data = ["--data-path", str(tmp_path / "corpus"), "--offload-alpha", "off", "--out", str(out)]
        assert main([*words, *data, "--device", "cpu", "--num-threads", "1", *flags]) == 0
        told.append(json.loads(out.read_text()))
    assert told[1] == told[0] and told[2] == told[0]


def test_profile_says_the_same_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The layer that is measured has its states on the device, wherever the run has them."""
    words = "profile --num-layers 6 --hidden-size 32 --seq-len 64 --device cpu --num-threads 1 --peak-tflops 1"
    out = tmp_path / "layer.json"
    assert main([*words.split(), "--profile-cache", "off", "--offload-states", "all", "--out", str(out)]) == 0
    assert "plan for activations of one layer and microbatch on this rank" in capsys.readouterr().out
    trace = tmp_path / "trace.json"
    flags = ["--offload-alpha", "off", "--offload-states", "all", "--trace-out", str(trace)]
    assert main([*words.split(), "--mock-data", "--profile-cache", "off", *flags]) == 0
    assert trace.exists()

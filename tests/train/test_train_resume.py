"""Stop and go on: N + N steps are 2 N steps, to the last bit in one layout and closely in another."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import tiny
from ranks import run_ranks

import memo
from memo.checkpoint import latest_checkpoint
from memo.errors import CheckpointError

STEPS = 3


def _train(world_size: int, layout: dict[str, Any], folder: Path, part: str, **overrides: Any) -> None:
    """Train under Trainer as a rank of torchrun would, logging to folder/part.jsonl."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    config = tiny("llama-tiny", lr_decay_iters=2 * STEPS, lr_warmup_iters=1, peak_tflops=1.0, num_threads=1)
    values = {"train_iters": 2 * STEPS, "log_jsonl": str(folder / f"{part}.jsonl"), "progress": False}
    trainer = memo.Trainer(config=config, **{**values, **layout, **overrides})
    trainer.train()


def losses(folder: Path, part: str) -> list[tuple[int, float, float]]:
    records = [json.loads(line) for line in (folder / f"{part}.jsonl").read_text().splitlines()]
    return [(r["iteration"], r["lm_loss"], r["grad_norm"]) for r in records]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps at once, and the first three with a checkpoint, on tp 2 x dp 2 in bf16."""
    folder = tmp_path_factory.mktemp("resume")
    layout = {"tp": 2, "params_dtype": "bf16"}
    run_ranks(4, _train, 4, layout, folder, "whole")
    run_ranks(4, _train, 4, layout, folder, "first", train_iters=STEPS, save=str(folder / "saved"))
    return folder


def test_first_half_equals_the_whole_run(folder: Path) -> None:
    assert losses(folder, "first") == losses(folder, "whole")[:STEPS]
    assert latest_checkpoint(folder / "saved").name == f"iter_{STEPS:07d}"


def test_same_layout_goes_on_bit_for_bit(folder: Path) -> None:
    run_ranks(4, _train, 4, {"tp": 2, "params_dtype": "bf16"}, folder, "second", load=str(folder / "saved"))
    assert losses(folder, "second") == losses(folder, "whole")[STEPS:]


@pytest.mark.parametrize(("world_size", "layout"), [(1, {}), (4, {"pp": 2, "cp": 2})], ids=["one", "pp2-cp2"])
def test_another_layout_goes_on_closely(folder: Path, world_size: int, layout: dict[str, Any]) -> None:
    """bf16 activations: other sums of 8-bit numbers, so 1 % is what may be asked."""
    part = f"other{world_size}"
    values = {**layout, "params_dtype": "bf16"}
    run_ranks(world_size, _train, world_size, values, folder, part, load=str(folder / "saved"))
    for got, wanted in zip(losses(folder, part), losses(folder, "whole")[STEPS:], strict=True):
        assert got[0] == wanted[0]
        assert got[1] == pytest.approx(wanted[1], rel=1e-2)


def _foreign_seed(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        _train(1, {}, folder, "seed", load=str(folder / "saved"), seed=5, params_dtype="bf16")
    return str(caught.value)


def test_another_seed_is_refused(folder: Path) -> None:
    message = run_ranks(1, _foreign_seed, folder)[0]
    assert "seed = 1234, this run has seed = 5" in message and "set seed = 1234" in message


def test_nothing_left_to_do(folder: Path) -> None:
    run_ranks(1, _train, 1, {}, folder, "done", load=str(folder / "saved"), train_iters=STEPS, params_dtype="bf16")
    assert losses(folder, "done") == []

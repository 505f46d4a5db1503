"""A run beside frozen weights of a Hugging Face directory: its checkpoints have what it trains, and name the rest."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_equal_bits
from hf_directories import VOCAB, write_model
from safetensors.torch import load_file, save_file
from trainers import train_whole_and_in_two

import memo
from memo.checkpoint.directory import latest_checkpoint
from memo.checkpoint.run_state import read_state
from memo.errors import CheckpointError, ConfigError

FLAGS: dict[str, Any] = {"mock_data": True, "seq_length": 32, "global_batch_size": 2, "train_iters": 4, "lora_rank": 2}
FLAGS |= {"device": "cpu", "progress": False, "peak_tflops": 1.0, "num_threads": 1, "lr": 1e-2, "lr_decay_iters": 4}


def trainer(directory: Path, **flags: Any) -> memo.Trainer:
    return memo.Trainer(str(directory), **{**FLAGS, **flags})


def train(directory: Path, **flags: Any) -> None:
    with trainer(directory, **flags) as made:
        made.train()


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("transformers")
    return write_model("llama", tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize("flags", [{}, {"quantize": "nf4"}, {"lora_rank": 0, "freeze": "layers.*"}], ids=str)
def test_checkpoints_lack_what_is_frozen_and_go_on_to_the_bit(
    base: Path, tmp_path: Path, flags: dict[str, Any]
) -> None:
    train_whole_and_in_two(lambda **more: trainer(base, **flags, **more), tmp_path, 2)
    whole, parts = (latest_checkpoint(tmp_path / name) for name in ("whole", "parts"))
    assert_equal_bits(whole, parts)
    ends, adapters = 2 * VOCAB * 32 + 32, 2 * 2 * (2 * (32 + 32) + 2 * (32 + 16) + 3 * (32 + 48))
    saved = sum(file.stat().st_size for file in whole.glob("tensors-*.bin"))
    assert read_state(whole).base
    assert saved == 12 * (ends if "freeze" in flags else adapters)  # fp32: weight and two moments


def test_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    """Also one whose files say the same of their tensors; and none."""
    run = str(tmp_path / "run")
    train(base, save=run, train_iters=2)
    other = write_model("llama", tmp_path)
    tensors = load_file(other / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1.0
    save_file(tensors, other / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is of adapters beside other weights than those of --pretrained-check"):
        train(other, load=run)
    with pytest.raises(CheckpointError, match=r"lacks the weights that its run had frozen: give the Hugging Face dir"):
        train(base, load=run, pretrained_checkpoint=None)
    train(base, save=str(tmp_path / "own"), train_iters=2, pretrained_checkpoint=None)
    with pytest.raises(CheckpointError, match=r"has the frozen weights of its run, which are those of no directory"):
        train(base, load=str(tmp_path / "own"))


def test_the_same_weights_elsewhere_are_the_same_base(base: Path, tmp_path: Path) -> None:
    run, moved = str(tmp_path / "run"), tmp_path / "moved"
    train(base, save=run, train_iters=2)
    moved.mkdir()
    for file in base.iterdir():
        (moved / file.name).write_bytes(file.read_bytes())
    train(moved, load=run)
    with pytest.raises(ConfigError, match=r"gone does not exist: if it has moved, say where it is with --model DIR"):
        train(moved, load=run, pretrained_checkpoint=str(tmp_path / "gone"))
    assert torch.equal(*(load_file(each / "model.safetensors")["lm_head.weight"] for each in (base, moved)))

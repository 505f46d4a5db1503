"""An exception anywhere in a training step leaves nothing behind: the same batch again gives the clean run's bits."""

from typing import Any

import pytest
import torch
from swapped_steps import Copies, Injected, counted, observed
from torch import Tensor

import memo
from memo.executor import tile_machine
from memo.executor.layer import TokenwiseLayer
from memo.parallel.context import ContextAttention
from memo.train.trainer import Trainer

LAYERS, MICROBATCHES, TILES = 3, 2, 2
PASSES = LAYERS * MICROBATCHES
# What raises: forward and backward, on whole sequences and inside tiles, also while tiles are recomputed.
PLACES: dict[str, tuple[object, str]] = {
    "attention": (ContextAttention, "forward"),
    "attention's backward": (ContextAttention, "backward"),
    "a tile of the MLP": (TokenwiseLayer, "_finish"),
    "a tile of the MLP's backward": (TokenwiseLayer, "_finish_backward"),
    "a matrix of forward or recompute": (tile_machine, "column_forward"),
}

pytestmark = pytest.mark.usefixtures("one_thread")


def make_trainer(copies: Copies) -> Trainer:
    shape = {"num_layers": LAYERS, "hidden_size": 16, "num_attention_heads": 2, "seq_length": 32}
    swaps = {"offload_alpha": 0.5, "offload_tiles": TILES}
    batch = {"micro_batch_size": 1, "global_batch_size": MICROBATCHES, "mock_data": True, "lr": 1e-2}
    machine: dict[str, Any] = {"device": "cpu", "num_threads": 1, "peak_tflops": 1.0, "progress": False}
    with observed(copies=copies):
        return memo.Trainer("gpt-tiny", **{**shape, **swaps, **batch, **machine})


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Every weight and every gradient of the last step."""
    sharded = trainer.parts.data_parallel
    weights = {name: value.detach().clone() for name, value in sharded.parameters.items()}
    return weights | {f"gradient of {n}": sharded.main_gradient(p).clone() for n, p in sharded.parameters.items()}


@pytest.mark.parametrize("place", PLACES)
def test_the_step_after_a_failed_one_is_clean(place: str) -> None:
    copies: Copies = "threads" if "backward" in place else "lazy"
    clean, trainer = make_trainer(copies), make_trainer(copies)
    with counted(*PLACES[place]) as calls:
        clean.step()
    trainer.step()
    num_calls = len(calls)
    assert num_calls >= PASSES
    for index in range(PASSES):  # in the middle of each pass: a microbatch in a layer
        sampler = trainer.feed.sampler.state_dict()
        with counted(*PLACES[place], raises_at=(2 * index + 1) * num_calls // (2 * PASSES)), pytest.raises(Injected):
            trainer.step()
        trainer.feed.sampler.load_state_dict(sampler)
        expected, actual = clean.step(), trainer.step()
        assert (actual.lm_loss, actual.grad_norm) == (expected.lm_loss, expected.grad_norm)
        wanted, found = state(clean), state(trainer)
        assert not [name for name, value in wanted.items() if not torch.equal(found[name], value)]

"""memo.Trainer of tiny models, as a test makes it in its own process or on a rank of run_ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layouts import tiny

import memo

QUIET: dict[str, Any] = {"peak_tflops": 1.0, "num_threads": 1, "progress": False}
"""Nothing is measured before the first step, and nothing is drawn."""
SMALL_RUN: dict[str, Any] = {
    **QUIET,
    "num_layers": 2,
    "hidden_size": 32,
    "seq_length": 64,
    "global_batch_size": 4,
    "lr": 1e-2,
    "device": "cpu",
}
"""Flags of a run of which a step takes milliseconds; its data is the test's to choose."""


def tiny_trainer(**flags: Any) -> memo.Trainer:
    """Of the tiny Llama of layouts.py, in fp32 unless `flags` say otherwise."""
    return memo.Trainer(config=tiny("llama-tiny", "fp32"), **{**QUIET, **flags})


def train_whole_and_in_two(make: Callable[..., memo.Trainer], folder: Path, steps: int) -> None:
    """Twice `steps` steps of one run into folder/whole, and of another with a stop between into folder/parts."""
    for name, train_iters in (("whole", 2 * steps), ("parts", steps), ("parts", 2 * steps)):
        save = str(folder / name)
        with make(save=save, load=save, train_iters=train_iters) as trainer:
            trainer.train()

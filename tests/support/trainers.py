"""memo.Trainer of tiny models, for tests in their own process or on a rank of run_ranks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from layouts import tiny

import memo

QUIET: dict[str, Any] = {"peak_tflops": 1.0, "num_threads": 1, "progress": False}
"""Flags with which nothing is measured before the first step, and nothing is drawn."""
SMALL_RUN: dict[str, Any] = {
    **QUIET,
    "num_layers": 2,
    "hidden_size": 32,
    "seq_length": 64,
    "global_batch_size": 4,
    "lr": 1e-2,
    "device": "cpu",
}
"""Flags of a run with steps of milliseconds; each test chooses the data."""


def tiny_trainer(**flags: Any) -> memo.Trainer:
    """Return a trainer of the tiny Llama of layouts.py, in fp32 unless `flags` say otherwise."""
    return memo.Trainer(config=tiny("llama-tiny", "fp32"), **{**QUIET, **flags})


def train_whole_and_in_two(make: Callable[..., memo.Trainer], folder: Path, steps: int) -> None:
    """Train 2 `steps` steps in one run to folder/whole, and in two runs of `steps` steps each to folder/parts."""
    for name, train_iters in (("whole", 2 * steps), ("parts", steps), ("parts", 2 * steps)):
        save = str(folder / name)
        with make(save=save, load=save, train_iters=train_iters) as trainer:
            trainer.train()

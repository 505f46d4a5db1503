"""Training steps with states in host memory or in slots, on the rank that runs them, and their results."""

from dataclasses import dataclass
from typing import Any

import torch
from forward import loss_of
from torch import Tensor

from memo.config import RunConfig
from memo.train.feed import Feed
from memo.train.optimizer import learning_rate
from memo.train.parallel_model import ParallelModel

ALL: dict[str, Any] = {"offload_states": "all"}
FRACTIONS = ("optimizer_offload_fraction", "gradient_offload_fraction", "weight_offload_fraction")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_states": "optimizer"},
    "all": ALL,
    "fractions": {**ALL, **dict(zip(FRACTIONS, (0.75, 0.5, 0.25), strict=True))},
    "no weight copy": {**ALL, "offload_weight_copy": False},
}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "seq_length": 32, "ddp_bucket_size": 500}
"""Flags of a small model whose layers have several buckets each."""


@dataclass
class Course:
    """Results of a run on one rank.

    Attributes:
        figures: by step the loss of this rank's share, the gradient norm, and whether weights were updated;
            after some steps also the loss of an evaluation.
        states: masters and moments at the end, by kind and place.
    """

    figures: list[tuple[float, ...]]
    states: dict[str, Tensor]


def states_of(model: ParallelModel) -> dict[str, Tensor]:
    """Return copies of this rank's masters and moments; their cut into segments does not depend on the placement."""
    return {
        f"{kind} {owner.segment.range.name} {owner.segment.start}": value.clone()
        for owner, kinds in model.optimizer.segment_states()
        for kind, value in kinds.items()
    }


def run_course(model: ParallelModel, feed: Feed, config: RunConfig, steps: int, evaluated: tuple[int, ...]) -> Course:
    """Run steps with the schedule of `config`, from a fresh model and its feed."""
    figures: list[tuple[float, ...]] = []
    for iteration in range(1, steps + 1):
        batches = feed.next_global_batch()
        loss, norm, updated = model.train_step(batches, learning_rate(config, iteration))
        figures.append((loss.item(), norm, updated))
        if iteration in evaluated:
            figures.append((loss_of(model, batches).item(),))
    return Course(figures, states_of(model))


def unlike(actual: Course, expected: Course) -> list[str]:
    """Return the names of values that are not equal to the last bit; a NaN equals nothing."""
    assert actual.states.keys() == expected.states.keys()
    found = [
        f"figures {i}: {ours} != {theirs}"
        for i, (ours, theirs) in enumerate(zip(actual.figures, expected.figures, strict=True))
        if ours != theirs
    ]
    return found + [name for name, theirs in expected.states.items() if not torch.equal(actual.states[name], theirs)]

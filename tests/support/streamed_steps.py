"""Training steps with states in host memory or in slots, on the rank that runs them, and what they gave."""

from dataclasses import dataclass
from typing import Any

import torch
from swapped_steps import Workplace
from torch import Tensor

from memo.config import RunConfig
from memo.model.transformer import Microbatch
from memo.train.build import ParallelModel
from memo.train.feed import Feed
from memo.train.optimizer import learning_rate

EVALUATED = (2,)
"""Steps after which the model is evaluated: between two that stream."""
STEPS = 6
"""Two before the evaluation and four after it.

A plan of copies is the same in each step and what is in a slot when a step ends is what the next one begins with, so
a copy that is wrong across steps shows in the second step, or in the one after the evaluation; two steps each warm the
learning rate up, lower it and keep the least.
"""
TILES = 2

ALL: dict[str, Any] = {"offload_states": "all"}
FRACTIONS = ("optimizer_offload_fraction", "gradient_offload_fraction", "weight_offload_fraction")
PLACEMENTS: dict[str, dict[str, Any]] = {
    "optimizer": {"offload_states": "optimizer"},
    "all": ALL,
    "fractions": {**ALL, **dict(zip(FRACTIONS, (0.75, 0.5, 0.25), strict=True))},
    "no weight copy": {**ALL, "offload_weight_copy": False},
}
SWAPS: dict[str, dict[str, Any]] = {
    "kept": {"offload_alpha": "off"},
    **{f"alpha {a}": {"offload_alpha": a, "offload_tiles": TILES} for a in (0.5, 1.0)},
}
TRAINING: dict[str, Any] = {
    "clip_grad": 0.8,
    "lr_warmup_iters": 2,
    "lr_decay_iters": STEPS - 1,
    "lr_decay_style": "cosine",
    "min_lr": 1e-3,
    "train_iters": STEPS,
}
SMALL: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "seq_length": 32, "ddp_bucket_size": 500}
"""Several buckets a layer."""


@dataclass
class Course:
    """What a run gave on one rank.

    Attributes:
        figures: by step the loss of this rank's share, the gradient norm, and whether weights were updated;
            after some steps the loss of an evaluation.
        states: masters and moments in the end, by kind and place.
    """

    figures: list[tuple[float, ...]]
    states: dict[str, Tensor]


def states_of(model: ParallelModel) -> dict[str, Tensor]:
    """This rank's masters and moments, copied; their cut into segments depends on no placement."""
    return {
        f"{kind} {owner.segment.slot.name} {owner.segment.start}": value.clone()
        for owner, kinds in model.optimizer.segment_states()
        for kind, value in kinds.items()
    }


def run_course(
    model: ParallelModel, feed: Feed, config: RunConfig, steps: int = STEPS, evaluated: tuple[int, ...] = EVALUATED
) -> Course:
    """Steps with the schedule of `config`, from a fresh model and its feed."""
    figures: list[tuple[float, ...]] = []
    for iteration in range(1, steps + 1):
        batches = feed.next_global_batch()
        loss, norm, updated = model.train_step(batches, learning_rate(config, iteration))
        figures.append((loss.item(), norm, updated))
        if iteration in evaluated:
            figures.append((model.forward(batches).item(),))
    return Course(figures, states_of(model))


def unlike(actual: Course, expected: Course) -> list[str]:
    """What is not equal to the last bit; a NaN equals nothing."""
    assert actual.states.keys() == expected.states.keys()
    found = [
        f"figures {i}: {ours} != {theirs}"
        for i, (ours, theirs) in enumerate(zip(actual.figures, expected.figures, strict=True))
        if ours != theirs
    ]
    return found + [name for name, theirs in expected.states.items() if not torch.equal(actual.states[name], theirs)]


def course_of(workplace: Workplace, **overrides: Any) -> tuple[Course, ParallelModel]:
    """A run of its own with these overrides."""
    model = workplace.build(**overrides)
    tiles = model.tiles
    return run_course(model, workplace.feed(tiles), workplace.config.override(overrides)), model


def gradients(model: ParallelModel, batches: list[Microbatch]) -> dict[str, Tensor]:
    """Reduced gradients of one global batch: this rank's shards, wherever they are."""
    model.forward_backward(batches)
    if model.states is not None:
        model.states.await_gradients()
    return {f"{s.segment.slot.name} {s.segment.start}": s.weight.grad.clone() for s in model.optimizer.segments}

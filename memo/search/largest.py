"""Finds the largest model of a family that fits, and the limit beyond it.

A family is a shape with a law by which its width grows with its depth:

    gpt       h = 128 L (GPT-3, arXiv 2005.14165, table 2.1: 32 x 4,096, 40 x 5,140, 96 x 12,288), 4 h inside, tied
    llama     between Llama's pairs: 32 x 4,096, 40 x 5,120, 60 x 6,656, 80 x 8,192, 126 x 16,384 (arXiv 2302.13971 and
              2407.21783), 3.5 h inside, 8 groups of keys and values, a vocabulary of 128,256
    --model   its own width / depth

Sizes rise by half a per cent. For each size two shapes are tried, with the two widths next to the law. A width is a
multiple of the size of a head times the GPUs of a node (at least 4), so that tensor parallelism of any degree divides
the heads; the depth follows from the size. A larger model needs more of everything, so bisection finds the largest.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Literal

from memo.config import ModelConfig
from memo.config.check_model import check_model
from memo.errors import ConfigError
from memo.search.axis import Axis, shortage_of, too_slow
from memo.search.plan import Largest
from memo.search.question import PlannedModel, Question
from memo.spec.parameters import layer_parameters
from memo.spec.shapes import shape_of
from memo.units import format_count

Family = Literal["gpt", "llama"]
BASES: dict[Family, str] = {"gpt": "gpt-13b", "llama": "llama-3.1-8b"}
"""Presets from which a family takes all other fields."""

Law = tuple[tuple[int, int], ...]
"""Pairs of depth and width, rising."""

_PAIRS: dict[Family, Law] = {
    "gpt": ((0, 0), (96, 12288)),
    "llama": ((0, 0), (32, 4096), (40, 5120), (60, 6656), (80, 8192), (126, 16384)),
}
_SMALLEST = 2e7
"""Parameters of all layers together in the smallest model."""
_STEP = 1.005
"""Ratio of the sizes of two successive models."""
_DEEPEST = 1 << 13
_STRIDE = 64
"""Steps of size between the models that are tried first: each is a third larger than the one before."""


def largest(question: Question, family: Family | None, min_tgs: float | None = None) -> tuple[Largest, Question]:
    """Return the largest model, and the question about it; if no model fits, the question is about the smallest.

    `question` is about any model of the family or, without a family, about the model whose shape is scaled. Some layout
    must train it with `min_tgs` tokens per GPU and second. Raises ConfigError for a model that memo cannot train, and
    for GPUs that memo cannot lay out.
    """
    axis = _scaling(question, family)
    count, beyond = axis.last_fitting(stride=_STRIDE)
    found = (axis.fitting(count) if count else None) or axis.questions(1)[0]
    unclipped, limit = found, ""
    if count and min_tgs is not None and axis.fastest(count).tgs < min_tgs:
        count, beyond = axis.last_fast(count, min_tgs)
        found = unclipped = axis.fastest(count).question if count else axis.questions(1)[0]
        slow = axis.fastest(beyond)
        limit = too_slow(f"{format_count(slow.question.model.shape.parameters)} parameters", slow.tgs, min_tgs)
    elif count and question.place_states != "never":  # else gradients never wait in host memory
        loose = Axis(lambda steps: [replace(each, clip_grad=0.0) for each in axis.questions(steps)])
        unclipped = loose.fitting(loose.last_fitting(count, _STRIDE)[0]) or found
    model = found.model.sizes
    return (
        Largest(
            family or question.model.name,
            model.num_layers,
            model.hidden_size,
            found.model.shape.parameters if count else 0,
            limit or shortage_of(axis.questions(beyond)[0]),
            unclipped.model.shape.parameters if count else 0,
        ),
        found,
    )


def _scaling(question: Question, family: Family | None) -> Axis:
    """Return the axis of questions about models, by the number of steps of their size."""
    base = question.model.sizes
    if question.model.run is None:
        raise ConfigError(
            f"--model {question.model.name} cannot be trained, only planned for, so it is not scaled: use --family "
            f"{' or '.join(_PAIRS)}"
        )
    law = _PAIRS[family] if family else ((0, 0), (base.num_layers, base.hidden_size))
    unit = base.head_dim * max(4, question.hardware.local_ranks(question.gpus))

    def scaled(steps: int) -> list[Question]:
        asked = []
        for model in _models_of_size(base, law, unit, _SMALLEST * _STEP**steps):
            shape = shape_of(model, "", question.seq_len)
            name = f"{family or question.model.name}-{format_count(shape.parameters)}"
            asked.append(replace(question, model=PlannedModel(name, replace(shape, name=name), model, model)))
        return asked

    axis = Axis(scaled)
    check_model(axis.questions(1)[0].base)
    return axis


def _models_of_size(base: ModelConfig, law: Law, unit: int, parameters: float) -> Iterator[ModelConfig]:
    """Yield models whose layers have about `parameters` parameters; the width nearer to the law comes first."""
    low, high = 0.0, 1.0 * _DEEPEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        each = layer_parameters(base).total * (_width(law, middle) / base.hidden_size) ** 2
        low, high = (middle, high) if middle * each < parameters else (low, middle)
    width = _width(law, high)
    below = max(1, int(width / unit)) * unit
    for found in sorted({below, below + unit}, key=lambda near: abs(near - width)):
        layers = round(parameters / layer_parameters(_resized(base, 1, found)).total)
        yield _resized(base, max(1, layers), found)


def _resized(base: ModelConfig, layers: int, width: int) -> ModelConfig:
    """Return `base` with another depth and width; heads keep their size. Lists with a number for each of the base's
    layers (experts, RoPE) are left out: all layers have experts, and all have RoPE."""
    heads = width // base.head_dim
    return replace(
        base,
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_query_groups=heads if base.kv_heads == base.num_attention_heads else math.gcd(base.kv_heads, heads),
        kv_channels=None if base.multi_latent_attention else base.head_dim,
        moe_layer_freq="",
        no_rope_freq="",
        ffn_hidden_size=width * base.ffn_size // base.hidden_size,
    )


def _width(law: Law, layers: float) -> float:
    """Return the width of a depth: interpolated between two pairs, in proportion to the last pair beyond it."""
    for (low, narrow), (high, wide) in pairwise(law):
        if layers <= high:
            return narrow + (wide - narrow) * (layers - low) / (high - low)
    last, wide = law[-1]
    return wide * layers / last

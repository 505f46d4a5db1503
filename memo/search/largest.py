"""The largest model of a family that fits, and what binds beyond it.

A family is a shape and how its width grows with its depth:

    gpt       h = 128 L (GPT-3, arXiv 2005.14165, table 2.1: 32 x 4,096, 40 x 5,140, 96 x 12,288), 4 h inside, tied
    llama     between Llama's pairs: 32 x 4,096, 40 x 5,120, 60 x 6,656, 80 x 8,192, 126 x 16,384 (arXiv 2302.13971 and
              2407.21783), 3.5 h inside, 8 groups of keys and values, a vocabulary of 128,256
    --model   its own width / depth

Sizes rise by half a per cent. Of each, two shapes are tried: the widths next to the law that are a multiple of
the heads' size and of the GPUs of a node (4 at least), so that tensor parallelism of any degree divides the heads; the
depth makes up the size. A larger model needs more of everything, so the largest is found by bisection.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Literal

from memo.config import ModelConfig
from memo.config.check_model import check_model
from memo.errors import ConfigError
from memo.search.fitting import Fitting, bisect, nearest, shortage_of, speed, too_slow
from memo.search.plan import Largest
from memo.search.question import PlannedModel, Question
from memo.spec.parameters import layer_parameters
from memo.spec.shapes import shape_of
from memo.units import format_count

Family = Literal["gpt", "llama"]
BASES: dict[Family, str] = {"gpt": "gpt-13b", "llama": "llama-3.1-8b"}
"""Presets whose other fields a family takes."""

Scaled = Callable[[int], tuple[Question, ...]]
Law = tuple[tuple[int, int], ...]
"""Depth and width, rising."""

_PAIRS: dict[Family, Law] = {
    "gpt": ((0, 0), (96, 12288)),
    "llama": ((0, 0), (32, 4096), (40, 5120), (60, 6656), (80, 8192), (126, 16384)),
}
_SMALLEST = 2e7
"""Parameters of all layers together."""
_STEP = 1.005
_DEEPEST = 1 << 13
_FAST_STEPS = 4
"""To within which the largest model of a speed is found, as each one is searched: 2 %."""


def largest(question: Question, family: Family | None, min_tgs: float | None = None) -> tuple[Largest, Question]:
    """The largest model, and the question about it (about the smallest one where none fits).

    Args:
        question: about any model of the family, or, without one, about the model whose shape is scaled.
        min_tgs: tokens per GPU and second at which a layout must also train it.

    Raises ConfigError for a model that memo cannot train, and for GPUs that it cannot lay out.
    """
    scaled = _scaling(question, family)
    count, found = _most(scaled)
    limit = ""
    if count and min_tgs is not None and speed(found, min_tgs) < min_tgs:
        count, found, limit = _fast_enough(scaled, found, count, min_tgs)
    is_clipping_free = question.place_states == "never"  # gradients never wait in host memory
    unclipped = found if limit or is_clipping_free else _most(_unclipped(scaled), count)[1]
    model = found.model.sizes
    return (
        Largest(
            family or question.model.name,
            model.num_layers,
            model.hidden_size,
            found.model.shape.parameters if count else 0,
            limit or _limit(scaled(count + 1)[0]),
            unclipped.model.shape.parameters if count else 0,
        ),
        found,
    )


def _unclipped(scaled: Scaled) -> Scaled:
    return lambda steps: tuple(replace(question, clip_grad=0.0) for question in scaled(steps))


def _most(scaled: Scaled, low: int = 0) -> tuple[int, Question]:
    """(steps of size that fit, about which model); `low` do already (0: nothing does)."""
    fitting = Fitting()

    def fitting_model(steps: int) -> Question | None:
        return next((question for question in scaled(steps) if fitting.fits(question)), None)

    def does_fit(steps: int) -> bool:
        return fitting_model(steps) is not None

    stride = 64
    while does_fit(low + stride):
        low, stride = low + stride, 2 * stride
    low, _ = bisect(does_fit, low, low + stride)
    return low, (fitting_model(low) if low else None) or scaled(max(low, 1))[0]


def _fast_enough(scaled: Scaled, slow: Question, high: int, min_tgs: float) -> tuple[int, Question, str]:
    """(steps of size, about which model, why no larger one) of the largest model that trains at `min_tgs`.

    It is below `high` steps, where `slow` fits but does not; 0 steps if none does. Larger models are taken to be
    slower.
    """

    @cache
    def fastest(steps: int) -> tuple[float, Question]:
        return _fastest(scaled(steps), min_tgs)

    low, beyond = bisect(lambda steps: fastest(steps)[0] >= min_tgs, 0, high, _FAST_STEPS)
    tgs, slow = _fastest((slow,) if beyond == high else scaled(beyond))
    best = fastest(low)[1] if low else scaled(1)[0]
    return low, best, too_slow(f"{format_count(slow.model.shape.parameters)} parameters", tgs, min_tgs)


def _fastest(questions: Iterable[Question], least_tgs: float = 0.0) -> tuple[float, Question]:
    return max(((speed(question, least_tgs), question) for question in questions), key=lambda pair: pair[0])


def _scaling(question: Question, family: Family | None) -> Scaled:
    """From a number of steps of size to the questions about models of it."""
    base = question.model.sizes
    if question.model.run is None:
        raise ConfigError(
            f"--model {question.model.name} cannot be trained, only planned for, so it is not scaled: use --family "
            f"{' or '.join(_PAIRS)}"
        )
    law = _PAIRS[family] if family else ((0, 0), (base.num_layers, base.hidden_size))
    unit = base.head_dim * max(4, question.hardware.local_ranks(question.gpus))

    @cache
    def scaled(steps: int) -> tuple[Question, ...]:
        models = _models_of_size(base, law, unit, _SMALLEST * _STEP**steps)
        return tuple(_asked(question, family or question.model.name, model) for model in models)

    check_model(scaled(1)[0].base)
    return scaled


def _asked(question: Question, family: str, model: ModelConfig) -> Question:
    shape = shape_of(model, "", question.seq_len)
    name = f"{family}-{format_count(shape.parameters)}"
    return replace(question, model=PlannedModel(name, replace(shape, name=name), model, model))


def _models_of_size(base: ModelConfig, law: Law, unit: int, parameters: float) -> Iterator[ModelConfig]:
    """Models whose layers have about so many, that with the width nearer to the law first."""
    low, high = 0.0, 1.0 * _DEEPEST
    while high - low > 1e-3:
        middle = (low + high) / 2
        each = layer_parameters(base).total * (_width(law, middle) / base.hidden_size) ** 2
        low, high = (middle, high) if middle * each < parameters else (low, middle)
    width = _width(law, high)
    below = max(1, int(width / unit)) * unit
    for found in sorted({below, below + unit}, key=lambda near: abs(near - width)):
        layers = round(parameters / layer_parameters(_resized(base, 1, found)).total)
        if layers:
            yield _resized(base, layers, found)


def _resized(base: ModelConfig, layers: int, width: int) -> ModelConfig:
    """As `base`, of another depth and width; heads keep their size."""
    heads = width // base.head_dim
    return replace(
        base,
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=heads,
        num_query_groups=base.num_query_groups and math.gcd(base.num_query_groups, heads),
        kv_channels=base.head_dim,
        ffn_hidden_size=width * base.ffn_size // base.hidden_size,
    )


def _width(law: Law, layers: float) -> float:
    """Between two pairs on the line through them, beyond the last in its proportion."""
    for (low, narrow), (high, wide) in pairwise(law):
        if layers <= high:
            return narrow + (wide - narrow) * (layers - low) / (high - low)
    last, wide = law[-1]
    return wide * layers / last


def _limit(question: Question) -> str:
    """Of the layout that comes nearest to holding this model."""
    if question.place_states == "never":
        return shortage_of(question)
    why, layout, strategy = nearest(question)
    return f"{why}, under {layout}, {strategy}"

"""`memo.plan`: one call from names and numbers to a plan."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from memo.config import ModelConfig, TrainingConfig
from memo.config.flag_table import dashed
from memo.config.model import Quantization
from memo.config.run import HardwareConfig, KernelSet
from memo.config.training import MomentDtype, Preference
from memo.errors import ConfigError
from memo.estimate.cases import DEFAULT_SEQ_LEN
from memo.estimate.disks import NVME_PATH
from memo.estimate.hardware import Hardware
from memo.search.largest import BASES, Family, largest
from memo.search.longest import length_unit, longest
from memo.search.plan import Plan
from memo.search.question import PlaceStates, Question, ask
from memo.search.ranking import search
from memo.spec.custom_layer import layer_name

Objective = Literal["tgs", "max-seq-len", "max-model-size"]
Tell = Callable[[str], None]
"""Called with a message about the current work, for a user who waits."""

_CHANGES = "under which the number of layers changes"
_OF_ONE_SHAPE = {"custom_layer": "which scales memo's own layer", "freeze": _CHANGES, "train_only": _CHANGES}
"""Fields that forbid --objective max-model-size, and the reason."""
_SHORTEST = 8192
"""Tokens of the shortest plan of `plans_by_length`."""


def plan(
    model: str | None,
    gpus: int,
    *,
    seq_len: int = DEFAULT_SEQ_LEN,
    global_batch_size: int | None = None,
    hardware: str | Hardware = "",
    gpu_memory_gib: float | None = None,
    host_memory_gib: float | None = None,
    objective: Objective = "tgs",
    family: Family | None = None,
    place_states: PlaceStates = "auto",
    min_tgs: float | None = None,
    nvme_gib: float | None = None,
    nvme_gb_per_s: float | None = None,
    nvme_path: str = NVME_PATH,
    clip_grad: float = TrainingConfig.clip_grad,
    exp_avg_dtype: MomentDtype = TrainingConfig.exp_avg_dtype,
    exp_avg_sq_dtype: MomentDtype = TrainingConfig.exp_avg_sq_dtype,
    deterministic: bool = False,
    kernels: KernelSet = HardwareConfig.kernels,
    preference: Preference | None = None,
    price_per_gpu_hour: float | None = None,
    custom_layer: str | type = "",
    lora_rank: int = ModelConfig.lora_rank,
    lora_target_modules: str = ModelConfig.lora_target_modules,
    quantize: Quantization = ModelConfig.quantize,
    freeze: str = "",
    train_only: str = "",
    top: int = 10,
) -> Plan:
    """Return the fastest layouts that fit; or the longest sequence or the largest model, with its fastest layouts.

    The arguments are the flags of `memo plan`, which docs/flags.md explains.

    Args:
        hardware: also a `Hardware`.
        custom_layer: also the class of the layer (memo.CustomLayer).

    Raises ConfigError for a name that is not known, a file that cannot be read, or a number that is not above 0.
    """
    asked = dict(locals())  # before anything else has a name: the arguments of `ask`, and a few of `answer`
    for name in ("model", "objective", "family", "min_tgs", "top"):
        del asked[name]
    if not isinstance(custom_layer, str):
        asked["custom_layer"] = layer_name(custom_layer)
    question = ask(base_model(model, family, objective), **asked)
    return answer(question, objective, top=top, family=family, min_tgs=min_tgs)


def base_model(model: str | None, family: Family | None, objective: Objective) -> str:
    """Return the model of a question. Raises ConfigError unless exactly one of `model` and `family` is given."""
    if family is None:
        if not model:
            raise ConfigError("--model is not given: name a preset or a config.json; for max-model-size also --family")
        return model
    if family not in BASES:
        raise ConfigError(f"--family is {family!r}: use {' or '.join(BASES)}")
    if objective != "max-model-size":
        raise ConfigError(
            f"--family {family} conflicts with --objective {objective}, which asks about one --model: name it"
        )
    if model:
        raise ConfigError(
            f"--family {family} conflicts with --model {model}, whose shape would be scaled: give one of both"
        )
    return BASES[family]


def answer(
    question: Question,
    objective: Objective = "tgs",
    *,
    top: int = 10,
    everything: bool = False,
    family: Family | None = None,
    min_tgs: float | None = None,
) -> Plan:
    """Answer a question as `plan` does. `everything`: rank all candidates that fit."""
    if objective not in get_args(Objective):
        raise ConfigError(f"--objective is {objective!r}: use {' or '.join(get_args(Objective))}")
    for name, why in _OF_ONE_SHAPE.items() if objective == "max-model-size" else ():
        value = getattr(question.model.sizes, name)
        if value:
            raise ConfigError(
                f"{dashed(name)} {value} conflicts with --objective max-model-size, {why}: ask for tgs or max-seq-len"
            )
    if top < 1:
        raise ConfigError(f"--top is {top}: give 1 or more")
    if min_tgs is not None and objective == "tgs":
        raise ConfigError(
            f"--min-tgs {min_tgs:g} conflicts with --objective tgs, which is as fast as it can be: give --objective "
            "max-seq-len or max-model-size"
        )
    if min_tgs is not None and not 0 < min_tgs < math.inf:
        raise ConfigError(f"--min-tgs is {min_tgs:g}: give tokens per GPU and second above 0, such as 500")
    if objective == "tgs":
        return search(question, top=top, everything=everything)
    if objective == "max-model-size":
        biggest, asked = largest(question, family, min_tgs)
        if not biggest.parameters:
            return Plan(asked, (), (), (), 0, 0, largest=biggest)
        return replace(_fast(search(asked, top=top, everything=everything), min_tgs), largest=biggest)
    found = longest(question, min_tgs)
    if not found.seq_len:
        return Plan(question, (), (), (), 0, 0, found)
    ranked = search(question.at_length(found.seq_len), top=top, everything=everything)
    return replace(_fast(ranked, min_tgs), longest=found)


def _fast(ranked: Plan, min_tgs: float | None) -> Plan:
    """Leave out the choices that train with fewer than `min_tgs` tokens per GPU and second."""
    return replace(ranked, choices=tuple(each for each in ranked.choices if each.step.tgs >= (min_tgs or 0.0)))


def plans_by_length(question: Question, tell: Tell = lambda what: None) -> list[Plan]:
    """Return a plan for each length from 8K tokens on, doubling, and for the longest sequence that fits.

    Each plan has a best choice; `memo plan --plot` draws the plans. `tell` is told which of them is computed.
    """
    tell("looking for the longest sequence")
    last, unit = longest(question).seq_len, length_unit(question.gpus)
    first = max(unit, _SHORTEST // unit * unit)
    lengths = [first << power for power in range(last.bit_length()) if first << power < last] + [last] * (last > 0)
    plans = []
    for number, length in enumerate(lengths, start=1):
        tell(f"planning for {length:,} tokens, {number} of {len(lengths)} lengths")
        plans.append(search(question.at_length(length)))
    return [plan for plan in plans if plan.best is not None]

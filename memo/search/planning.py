"""`memo.plan`: one call from names and numbers to a plan."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Literal, get_args

from memo.config import ModelConfig, TrainingConfig
from memo.config.flag_table import dashed
from memo.config.model import Quantization
from memo.config.training import MomentDtype
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
"""Hears what is being done, for whoever waits."""

_CHANGES = "under which the number of layers changes"
_OF_ONE_SHAPE = {"custom_layer": "which scales memo's own layer", "freeze": _CHANGES, "train_only": _CHANGES}
"""Fields of a model that is not scaled, and why."""
_SHORTEST = 8192
"""Tokens of the first plan by length."""


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
    place_states: PlaceStates = "needed",
    min_tgs: float | None = None,
    nvme_gib: float | None = None,
    nvme_gb_per_s: float | None = None,
    nvme_path: str = NVME_PATH,
    clip_grad: float = TrainingConfig.clip_grad,
    exp_avg_dtype: MomentDtype = TrainingConfig.exp_avg_dtype,
    exp_avg_sq_dtype: MomentDtype = TrainingConfig.exp_avg_sq_dtype,
    deterministic: bool = False,
    price_per_gpu_hour: float | None = None,
    custom_layer: str | type = "",
    lora_rank: int = ModelConfig.lora_rank,
    lora_target_modules: str = ModelConfig.lora_target_modules,
    quantize: Quantization = ModelConfig.quantize,
    freeze: str = "",
    train_only: str = "",
    top: int = 10,
) -> Plan:
    """The fastest layouts that fit; or the longest sequence, or the largest model, and the fastest layouts for it.

    Args:
        model: a preset, or the path of a config.json of Hugging Face; for the largest model the shape that is scaled,
            or None beside a family.
        seq_len: tokens of one sequence; not read for the longest.
        global_batch_size: sequences of one step; default: one for each GPU.
        hardware: a machine by name, a TOML file of one, or a `Hardware`; default: MEMO's a800-80.
        gpu_memory_gib: of one GPU, as nvidia-smi reports it; default: the hardware's.
        host_memory_gib: what the run gets of each node's; default: of the hardware's the part of its GPUs.
        family: for the largest model: gpt or llama, whose widths and depths are taken (memo.search.largest).
        place_states: ZeRO-2, ZeRO-3 and states in host memory: where nothing fits without, always, or never.
        min_tgs: tokens per GPU and second at which the longest sequence, or the largest model, must still train.
        nvme_gib: of a node's disks for activations that its memory does not hold; default: the hardware's, if any.
        nvme_gb_per_s: their rate in either direction; default: the hardware's, or 2.
        nvme_path: their directory in a run that needs them.
        clip_grad: 0: gradients need not wait in host memory for their norm.
        exp_avg_dtype: fp32 or bf16: what the first moments of AdamW are kept in.
        exp_avg_sq_dtype: the same of the second moments.
        deterministic: whether every run gives the same bits.
        price_per_gpu_hour: dollars; default: that of a dated table (memo.estimate.prices), which may have none.
        custom_layer: a layer in the place of the model's (memo.CustomLayer): its class, or FILE.py:CLASS.
        lora_rank: of LoRA's adapters beside a frozen model; 0: all of it is trained.
        lora_target_modules: the matrices that have them.
        quantize: nf4 or int8: what the frozen matrices of layers are kept in.
        freeze: patterns of parameters that are not trained, such as layers.[0-7].*.
        train_only: the same of those that are trained.
        top: how many layouts (tp x cp x pp) to rank, 1 or more.

    Raises ConfigError for what is not known, cannot be read, or is not above 0.
    """
    asked = dict(locals())  # before anything else has a name: the arguments of `ask`, and a few of `answer`
    for name in ("model", "objective", "family", "min_tgs", "top"):
        del asked[name]
    if not isinstance(custom_layer, str):
        asked["custom_layer"] = layer_name(custom_layer)
    question = ask(base_model(model, family, objective), **asked)
    return answer(question, objective, top=top, family=family, min_tgs=min_tgs)


def base_model(model: str | None, family: Family | None, objective: Objective) -> str:
    """The model that a question is asked about. Raises ConfigError unless one of `model` and `family` is given."""
    if family is None:
        if not model:
            raise ConfigError("--model is not given: name a preset or a config.json; for max-model-size also --family")
        return model
    if family not in BASES:
        raise ConfigError(f"--family is {family!r}: use {' or '.join(BASES)}")
    if objective != "max-model-size":
        raise ConfigError(
            f"--family {family} fights with --objective {objective}, which asks about one --model: name it"
        )
    if model:
        raise ConfigError(
            f"--family {family} fights with --model {model}, whose shape would be scaled: give one of both"
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
    """As `plan`, of a question that has been read. `everything`: rank all candidates that fit."""
    if objective not in get_args(Objective):
        raise ConfigError(f"--objective is {objective!r}: use {' or '.join(get_args(Objective))}")
    for name, why in _OF_ONE_SHAPE.items() if objective == "max-model-size" else ():
        value = getattr(question.model.sizes, name)
        if value:
            raise ConfigError(
                f"{dashed(name)} {value} fights with --objective max-model-size, {why}: ask for tgs or max-seq-len"
            )
    if top < 1:
        raise ConfigError(f"--top is {top}: give 1 or more")
    if min_tgs is not None and objective == "tgs":
        raise ConfigError(
            f"--min-tgs {min_tgs:g} fights with --objective tgs, which is as fast as it can be: give --objective "
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
        return replace(search(asked, top=top, everything=everything), largest=biggest)
    found = longest(question, min_tgs)
    if not found.seq_len:
        return Plan(question, (), (), (), 0, 0, found)
    return replace(search(question.at_length(found.seq_len), top=top, everything=everything), longest=found)


def silent(what: str) -> None:
    """Tells nobody."""


def plans_by_length(question: Question, tell: Tell = silent) -> list[Plan]:
    """A plan for each length from 8K tokens on, doubling, and for the longest that fits; each has a best choice.

    It is what `memo plan --plot` draws. `tell` hears which of them is looked for.
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

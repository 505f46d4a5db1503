"""Which parameters are trained, and the adapters of LoRA beside frozen matrices (Hu et al., 2021).

    y = x W^T + c (x A^T) B^T        A [r, in], B [out, r]; c = alpha / r, or alpha / sqrt(r) (rsLoRA)

B is zero at first, so that an adapter changes nothing. Each part of a fused matrix has an A and a B of its own, one
below the other: x A^T is then r wide for each part. Tensor parallelism splits B as W's rows, or A as W's columns; the
other one is whole on every rank, as both are where W is (latents of attention), and the products need no message
beside those of W.
"""

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase

from memo.config.layer_words import LORA_TARGETS
from memo.config.model import ModelConfig
from memo.errors import ConfigError
from memo.spec.weights import Split, Weight, is_of_adapter

_A, _B = "lora_A.weight", "lora_B.weight"
_NONE = "-"
"""A pattern that no name matches."""


def trains_all(model: ModelConfig) -> bool:
    """Whether nothing is frozen."""
    return not (model.lora_rank or model.freeze or model.train_only)


def lora_factor(model: ModelConfig) -> float:
    """The factor c on the output of an adapter."""
    alpha = model.lora_alpha or model.lora_rank
    return alpha / (math.sqrt(model.lora_rank) if model.lora_use_rslora else model.lora_rank)


def adapter_names(name: str) -> tuple[str, str]:
    """Names of the global tensors A and B beside the matrix that is the global tensor `name`."""
    matrix = name.removesuffix("weight")
    return matrix + _A, matrix + _B


def as_trained(model: ModelConfig, weights: Iterable[Weight], prefix: str = "") -> tuple[Weight, ...]:
    """A module's parameters with their adapters behind them; parameters that are not trained are marked frozen.

    `prefix`: before the names of the module's tensors, "layers.*." for a layer; the model's patterns are then those of
    its kind of layer.
    """
    if trains_all(model):
        return tuple(weights)
    return tuple(_with_adapters(model, [_frozen(model, weight, prefix) for weight in weights], bool(prefix)))


def _frozen(model: ModelConfig, weight: Weight, prefix: str) -> Weight:
    frozen = not any(is_trained(model, prefix + name) for name, _ in weight.parts)
    is_matrix = bool(prefix) and weight.name.endswith(".weight") and weight.split in ("rows", "columns")
    coded = frozen and is_matrix and weight.columns is not None and model.quantize != "none"
    return weight._replace(frozen=frozen, coded=coded)


def is_trained(model: ModelConfig, name: str) -> bool:
    """Whether a global tensor is trained that belongs to no adapter."""
    if model.train_only:
        return _matches(name, model.train_only)
    return not model.lora_rank and not _matches(name, model.freeze)


def _matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern.strip()) for pattern in patterns.split(","))


def _with_adapters(model: ModelConfig, weights: list[Weight], in_layer: bool) -> Iterator[Weight]:
    """The parameters, with each adapter behind its matrix and that matrix's bias, as in the model's modules."""
    for weight, following in zip(weights, [*weights[1:], None], strict=True):
        yield weight
        module = weight.name.rpartition(".")[0]
        if model.lora_rank and in_layer and (following is None or following.name.rpartition(".")[0] != module):
            matrix = next(each for each in weights if each.name.startswith(f"{module}."))
            yield from _adapter(model, matrix)


def _adapter(model: ModelConfig, matrix: Weight) -> Iterator[Weight]:
    module, rank = matrix.name.removesuffix(".weight"), model.lora_rank
    parts = [(name, rows) for name, rows in matrix.parts if _is_target(model, name)]
    is_router = matrix.split == "whole" and matrix.name.startswith("mlp.")
    if matrix.columns is None or is_router or not parts:
        return
    a = tuple((adapter_names(name)[0], rank) for name, _ in parts)
    b = tuple((adapter_names(name)[1], rows) for name, rows in parts)
    splits: tuple[Split, Split] = ("columns", "whole") if matrix.split == "columns" else ("whole", matrix.split)
    experts = matrix.experts
    yield Weight(f"{module}.adapter.a", a, matrix.columns, splits[0], "uniform_by_columns", experts=experts)
    yield Weight(f"{module}.adapter.b", b, rank, splits[1], "zeros", experts=experts)


def _is_target(model: ModelConfig, name: str) -> bool:
    if not name.endswith(".weight") or name.endswith(".kernels.weight"):
        return False
    if model.lora_target_modules == "all-linear":
        return True
    return any(_named(name) in LORA_TARGETS[target.strip()] for target in model.lora_target_modules.split(","))


def _named(name: str) -> str:
    """The name in LORA_TARGETS for a tensor of a layer."""
    part = re.sub(r"^mlp\.(shared|experts\.\d+)\.", "mlp.", name.removesuffix(".weight"))
    return part.replace("attention.delta.", "attention.")


def of_one_layer(model: ModelConfig, layer: int) -> ModelConfig:
    """`model` with the patterns that can match a name of this layer; layers whose names match alike get equal
    patterns."""
    if not (model.freeze or model.train_only):
        return model
    return replace(model, freeze=_of_layer(model.freeze, layer), train_only=_of_layer(model.train_only, layer))


def _of_layer(patterns: str, layer: int) -> str:
    """`layers.NUMBERS.rest` becomes `layers.*.rest` where NUMBERS match the layer, and else nothing."""
    kept = []
    for pattern in filter(None, patterns.split(",")):
        start, _, after = pattern.strip().partition(".")
        numbers, _, rest = after.partition(".")
        if start != "layers" or not rest or set(numbers) - set("0123456789*?[]!-"):
            kept.append(pattern.strip())
        elif numbers == "*" or fnmatchcase(str(layer), numbers):
            kept.append(f"layers.*.{rest}")
    return ",".join(kept or [_NONE] * bool(patterns))


def check_patterns(model: ModelConfig, parameters: Iterable[tuple[str, Weight]]) -> None:
    """Raises ConfigError for a pattern of --freeze or --train-only that no tensor matches, for a fused matrix that is
    trained in part, for a name in --lora-target-modules whose matrix the model does not have, and where nothing is
    trained.

    `parameters`: each with the prefix of its tensors' names, which is empty outside of layers.
    """
    known = [(prefix, weight) for prefix, weight in parameters if not is_of_adapter(weight.name)]
    _check_targets(model, [name for prefix, weight in known if prefix for name, _ in weight.parts])
    names = [prefix + name for prefix, weight in known for name, _ in weight.parts]
    for flag, patterns in (("--freeze", model.freeze), ("--train-only", model.train_only)):
        for pattern in filter(None, patterns.split(",")):
            if not any(fnmatchcase(name, pattern.strip()) for name in names):
                raise ConfigError(
                    f"{flag} {pattern.strip()} matches no parameter: the model has {', '.join(names[:3])}, ..., "
                    f"{names[-1]}; * stands for any letters, as in layers.*.mlp.*"
                )
    for prefix, weight in known:
        trained = {name: is_trained(model, prefix + name) for name, _ in weight.parts}
        if len(set(trained.values())) > 1:
            free, fixed = (next(name for name, is_on in trained.items() if is_on is wanted) for wanted in (True, False))
            raise ConfigError(
                f"{'--train-only' if model.train_only else '--freeze'} trains {prefix}{free} and not {prefix}{fixed}, "
                "which memo has in one matrix: name both or neither"
            )
    if not model.lora_rank and not any(is_trained(model, name) for name in names):
        raise ConfigError(f"--freeze {model.freeze} leaves no parameter to train: freeze fewer")


def _check_targets(model: ModelConfig, in_layers: list[str]) -> None:
    if not model.lora_rank or model.lora_target_modules == "all-linear":
        return
    matrices = {_named(name) for name in in_layers if name.endswith(".weight")}
    has = [target for target, parts in LORA_TARGETS.items() if matrices.intersection(parts)]
    for target in model.lora_target_modules.split(","):
        if target.strip() not in has:
            raise ConfigError(
                f"--lora-target-modules {model.lora_target_modules} names {target.strip()}, and the model has no such "
                f"matrix: give all-linear, or some of {', '.join(has)}"
            )

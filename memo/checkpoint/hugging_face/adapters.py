"""LoRA adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors.

    base_model.model.MODULE.lora_A.weight    [r, in]     MODULE: the module of the matrix in the Hugging Face model
    base_model.model.MODULE.lora_B.weight    [out, r]

If a family fuses several matrices in one, memo has an adapter for each part. An export writes them as one adapter of
the fused matrix: it stacks the A's, puts each B in the columns of its A and the rows of its part, and fills the rest
with zeros; rank and alpha grow by the number of parts. An import of an adapter of a fused matrix gives each part the
whole A.

Each expert has its own adapters, under the names of its matrices in files of the hub. transformers 5 keeps the
matrices of all experts in one tensor: PEFT converts the adapters when it loads them, and finds them by the last word of
a module's name, so adapters of any other MLP of the model would be taken for an expert's.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from memo.artifacts.model_directory import model_file
from memo.artifacts.reading import Source, read_json_object, shown
from memo.checkpoint.chunks import GlobalTensor, Part, Shape
from memo.checkpoint.hugging_face.names import HuggingFacePlace, global_shapes, places
from memo.config import RunConfig
from memo.config.flag_table import dashed
from memo.config.hugging_face import HuggingFaceModel
from memo.config.hugging_face_wrappers import NAMINGS, renamed
from memo.config.identity import differences, model_identity
from memo.config.model import ModelConfig
from memo.config.require import require
from memo.errors import CheckpointError, ConfigError
from memo.spec.lora import adapter_names, lora_factor
from memo.spec.shapes import adapted_matrices

ADAPTER_CONFIG, ADAPTER_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_KINDS = (".lora_A.weight", ".lora_B.weight")
_TASK = "CAUSAL_LM"
_OF_TRAINING = tuple(
    entry.name for entry in fields(ModelConfig) if entry.name.startswith(("lora_", "freeze", "train_", "quantize"))
)
_OF_THE_RUN = (*_OF_TRAINING, "vocab_size", "max_position_embeddings")
"""Fields that do not change what the model computes from its weights."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """One matrix [rows, columns] of the Hugging Face model, and memo's matrices with adapters that are its parts: the
    global name, place and shape of each."""

    parts: tuple[tuple[str, HuggingFacePlace, Shape], ...]
    rows: int
    columns: int

    def rank(self, model: ModelConfig) -> int:
        """The rank of the adapters of all parts together."""
        return model.lora_rank * len(self.parts)

    def of_b(self, index: int, b: Tensor) -> list[Part]:
        """The rows of part `index` in B [out, n] of the whole matrix, as memo stores them."""
        _, place, (rows, _) = self.parts[index]
        return replace(place, transposed=False, convolves=False).parts_of((rows, b.shape[1]), b)


def adapted_modules(config: RunConfig, model_type: str) -> dict[str, AdaptedMatrix]:
    """{module of the Hugging Face model, by its family's name: its matrix with adapters}.

    Raises ConfigError for adapters that have no name in PEFT's files.
    """
    shapes = global_shapes(config.model, config.model.position_rows(config.data.seq_length))
    found: dict[str, list[tuple[str, HuggingFacePlace, Shape]]] = {}
    of_all = places(config.model, model_type, shapes)
    has_experts = config.model.num_experts > 0
    for name in adapted_matrices(config.model):
        place = of_all[name]
        require(
            not place.num_experts and (not has_experts or ".mlp." not in name or ".experts." in name),
            f"--lora-target-modules {config.model.lora_target_modules} has adapters beside {name}, which PEFT cannot "
            "name in a model whose experts are stacked: write the whole model with --merge-adapters, or train the "
            "matrices of attention alone",
        )
        found.setdefault(place.name.removesuffix(".weight"), []).append((name, place, shapes[name]))
    modules = {}
    for module, parts in found.items():
        _, place, shape = parts[0]
        rows = shape[0] // place.block * place.total if place.total else shape[0]
        modules[module] = AdaptedMatrix(tuple(parts), rows, shape[1])
    return modules


def stand_alone(config: RunConfig, base: HuggingFaceModel) -> bool:
    """Whether PEFT's files hold all that distinguishes the model of a LoRA run from `base`."""
    try:
        adapted_modules(config, base.model_type)
        check_alone(config, base)
    except ConfigError:
        return False
    return True


def check_alone(config: RunConfig, base: HuggingFaceModel | None) -> None:
    """Raises ConfigError if a run has trained more than adapters, or computes something else than `base` from the same
    weights; None: the initial model is not known."""
    require(
        not config.model.train_only,
        f"--train-only {config.model.train_only} has trained more than adapters, which PEFT's files do not hold: "
        "write the whole model with --merge-adapters",
    )
    if base is None:
        return
    own = {name: getattr(config.model, name) for name in _OF_THE_RUN}
    before = model_identity(replace(config, model=replace(base.model, **own)))
    for name, values in differences(before, model_identity(config)).items():
        raise ConfigError(
            f"the adapters were trained with another {dashed(name)} than config.json of the model says ({values}), "
            "which PEFT's files do not tell: write the whole model with --merge-adapters"
        )


def adapter_config(config: RunConfig, modules: Mapping[str, AdaptedMatrix], naming: tuple[str, str]) -> dict[str, Any]:
    """The content of adapter_config.json; `naming`: how the Hugging Face model names modules, as in NAMINGS."""
    model, alpha = config.model, config.model.lora_alpha or float(config.model.lora_rank)
    names = {module: renamed(module, naming) or module for module in modules}
    targets = (name.rpartition(".")[2] if ".experts." in name else name for name in names.values())
    fused = {module: len(matrix.parts) for module, matrix in modules.items() if len(matrix.parts) > 1}
    grown = {module: math.sqrt(count) if model.lora_use_rslora else count for module, count in fused.items()}
    return {
        "peft_type": "LORA",
        "task_type": _TASK,
        "base_model_name_or_path": config.checkpoint.pretrained_checkpoint,
        "r": model.lora_rank,
        "lora_alpha": alpha,
        "use_rslora": model.lora_use_rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(dict.fromkeys(targets)),
        "rank_pattern": {names[module]: model.lora_rank * count for module, count in fused.items()},
        "alpha_pattern": {names[module]: alpha * factor for module, factor in grown.items()},
        "fan_in_fan_out": any(place.transposed for matrix in modules.values() for _, place, _ in matrix.parts),
        "inference_mode": True,
    }


def exported_adapters(
    model: ModelConfig,
    modules: Mapping[str, AdaptedMatrix],
    naming: tuple[str, str],
    dtype_of: Callable[[str], torch.dtype],
    fill: Callable[[Mapping[str, GlobalTensor]], None],
) -> dict[str, Tensor]:
    """The tensors of adapter_model.safetensors. `fill` reads memo's global tensors into views of these tensors."""
    found: dict[str, Tensor] = {}
    wanted: dict[str, GlobalTensor] = {}
    rank = model.lora_rank
    for module, matrix in modules.items():
        dtype = dtype_of(adapter_names(matrix.parts[0][0])[0])
        a = torch.zeros(matrix.rank(model), matrix.columns, dtype=dtype)
        b = torch.zeros(matrix.rows, matrix.rank(model), dtype=dtype)
        for index, (name, _, (rows, _)) in enumerate(matrix.parts):
            own, (of_a, of_b) = slice(index * rank, (index + 1) * rank), adapter_names(name)
            wanted[of_a] = GlobalTensor.whole(a[own])
            wanted[of_b] = GlobalTensor((rows, rank), dtype, matrix.of_b(index, b[:, own]))
        base = f"{_PREFIX}{renamed(module, naming) or module}"
        found |= dict(zip((base + kind for kind in _KINDS), (a, b), strict=True))
    fill(wanted)
    return found


def merge(
    model: ModelConfig,
    name: str,
    parts: Sequence[Part],
    dtype: torch.dtype,
    fill: Callable[[Mapping[str, GlobalTensor]], None],
) -> None:
    """Add c B A to the parts of a matrix, computed in the adapter's `dtype` and rounded once."""
    of_a, of_b = adapter_names(name)
    rows = max(part.offset[0] + part.shape[0] for part in parts)
    a = torch.empty(model.lora_rank, parts[0].shape[1], dtype=dtype)
    b = torch.empty(rows, model.lora_rank, dtype=dtype)
    fill({of_a: GlobalTensor.whole(a), of_b: GlobalTensor.whole(b)})
    for part in parts:
        weight, (first, *_) = part.values(), part.offset
        weight.copy_(weight.to(dtype) + lora_factor(model) * (b[first : first + part.shape[0]] @ a))


def read_adapters(directory: str | Path, config: RunConfig, model_type: str) -> dict[str, Tensor]:
    """A [r, in] and B [out, r] of each matrix by their global names, from a directory of PEFT.

    Raises CheckpointError unless its adapters are as --lora-rank and the other LoRA flags describe them.
    """
    modules = adapted_modules(config, model_type)
    tensors, stacked = _stored(Path(directory)), _check_config(Path(directory), config, modules)
    found: dict[str, Tensor] = {}
    for module, matrix in modules.items():
        bases = [f"{_PREFIX}{name}" for naming in NAMINGS if (name := renamed(module, naming)) is not None]
        base = next((each for each in bases if each + _KINDS[0] in tensors), bases[0])
        pair = [tensors.pop(base + kind, None) for kind in _KINDS]
        if pair[0] is None or pair[1] is None:
            raise CheckpointError(
                f"{directory} has no adapter beside {module}: name the matrices that have one with "
                "--lora-target-modules, or give the adapter of a run with the same ones"
            )
        is_stacked = stacked and len(matrix.parts) > 1
        found |= _parts_of(str(directory), config.model, (module, matrix), (pair[0], pair[1]), is_stacked)
    if tensors:
        raise CheckpointError(
            f"{directory} has {shown(min(tensors))}, which this run does not train: name the matrix with "
            "--lora-target-modules, or merge it into the model's weights first"
        )
    return found


def _stored(directory: Path) -> dict[str, Tensor]:
    path = model_file(directory, ADAPTER_FILE)
    if path is None:
        raise CheckpointError(
            f"{directory} has no {ADAPTER_FILE}: give a directory that PEFT's save_pretrained or `memo export` wrote"
        )
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): copy or download it again") from None


def _check_config(directory: Path, config: RunConfig, modules: Mapping[str, AdaptedMatrix]) -> bool:
    """Check adapter_config.json. Returns whether fused matrices have stacked adapters, as an export writes them."""
    model = config.model
    path = model_file(directory, ADAPTER_CONFIG)
    if path is None:
        raise CheckpointError(f"{directory} has no {ADAPTER_CONFIG}: copy or download the whole adapter")
    theirs = read_json_object(path, Source(str(path), CheckpointError, "copy or download it again"))
    for key, needed in (("peft_type", "LORA"), ("bias", "none"), ("use_dora", False), ("modules_to_save", None)):
        if theirs.get(key, needed) not in (needed, []):
            raise CheckpointError(
                f"{path}: {key} is {shown(theirs[key])}, and memo reads adapters of LoRA with {needed}: merge it into "
                "the model's weights first"
            )
    ours = {
        "r": ("--lora-rank", model.lora_rank, 8),
        "lora_alpha": ("--lora-alpha", model.lora_alpha or float(model.lora_rank), 8),
        "use_rslora": ("--lora-use-rslora", model.lora_use_rslora, False),
    }
    for key, (flag, value, default) in ours.items():
        there = theirs.get(key, default)
        if there != value:
            raise CheckpointError(
                f"{path}: {key} is {shown(there)}, and {flag} makes it {value}: train its adapters with the same"
            )
    own, is_apart = adapter_config(config, modules, NAMINGS[0]), False
    for key in ("rank_pattern", "alpha_pattern"):
        pattern = theirs.get(key) or {}
        of_modules = {name: found for name in modules if (found := _of_module(pattern, name)) is not None}
        if of_modules not in ({}, own[key]):
            raise CheckpointError(
                f"{path}: its {key} gives matrices ranks or factors of their own, and memo's adapters have one of all: "
                "merge it into the model's weights first"
            )
        is_apart = bool(of_modules)
    return is_apart


def _of_module(pattern: Mapping[str, float], module: str) -> float | None:
    """A module's value in a pattern of PEFT, whose keys are the end of a module's path or a regular expression."""
    for key, value in pattern.items():
        end = key.replace(".*\\.", "").replace("\\.", ".")
        own = [name for naming in NAMINGS if (name := renamed(module, naming)) is not None]
        if any(f".{name}".endswith(f".{end}") for name in own):
            return value
    return None


def _parts_of(
    directory: str,
    model: ModelConfig,
    of: tuple[str, AdaptedMatrix],
    tensors: tuple[Tensor, Tensor],
    is_stacked: bool,
) -> dict[str, Tensor]:
    (module, matrix), (a, b), rank = of, tensors, model.lora_rank
    count = len(matrix.parts)
    expected = [(rank * count if is_stacked else rank, matrix.columns), (matrix.rows, a.shape[0])]
    if [tuple(a.shape), tuple(b.shape)] != expected:
        raise CheckpointError(
            f"{directory}: the adapter beside {module} has matrices of {tuple(a.shape)} and {tuple(b.shape)}, and this "
            f"model and --lora-rank {rank} need {expected[0]} and {expected[1]}: give the flags of the run that made it"
        )
    found: dict[str, Tensor] = {}
    for index, (name, _, _) in enumerate(matrix.parts):
        own = slice(index * rank, (index + 1) * rank) if is_stacked else slice(rank)
        of_a, of_b = adapter_names(name)
        found[of_a] = a[own]
        found[of_b] = torch.cat([part.values() for part in matrix.of_b(index, b[:, own])])
    taken = sum(int(found[adapter_names(name)[1]].count_nonzero()) for name, _, _ in matrix.parts)
    if taken != int(b.count_nonzero()):
        raise CheckpointError(
            f"{directory}: the adapter beside {module}, a matrix of {count} that are fused, is not one of each of "
            "them: merge it into the model's weights first"
        )
    return found

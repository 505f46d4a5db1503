"""`memo export`: a checkpoint of memo as a directory that AutoModelForCausalLM.from_pretrained loads."""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from memo.artifacts.model_directory import model_file, path_within
from memo.artifacts.regular_file import copy_file, replace_file
from memo.checkpoint.chunks import GlobalTensor, Shape
from memo.checkpoint.directory import resolve_checkpoint
from memo.checkpoint.files import RUN_CONFIG
from memo.checkpoint.hugging_face.adapters import (
    ADAPTER_CONFIG,
    ADAPTER_FILE,
    adapted_modules,
    adapter_config,
    check_alone,
    exported_adapters,
    merge,
    stand_alone,
)
from memo.checkpoint.hugging_face.companions import (
    COMPANION_DIR,
    COMPANIONS,
    LEARNED_TEMPLATE,
    REST_FILE,
    check_tokenizer,
    copy_tokenizer,
)
from memo.checkpoint.hugging_face.files import tensor_bytes, write_safetensors
from memo.checkpoint.hugging_face.generation import add_token_ids
from memo.checkpoint.hugging_face.load import frozen_from, open_pretrained
from memo.checkpoint.hugging_face.names import HuggingFacePlace, global_shapes, places
from memo.checkpoint.hugging_face.run_weights import RunWeights, check_base
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import check_shapes, open_checkpoint
from memo.config import RunConfig
from memo.config.hugging_face import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, HuggingFaceModel, read_config
from memo.config.hugging_face_wrappers import MODULES, NAMINGS, WRAPPERS, renamed
from memo.config.identity import differences, model_identity
from memo.config.model import ModelConfig
from memo.config.run import read_toml
from memo.config.to_hugging_face import write_config
from memo.data.chat_templates import TEMPLATE_FILE
from memo.errors import CheckpointError, ConfigError, writing
from memo.spec.lora import adapter_names
from memo.spec.shapes import EXPERT_BIAS, adapted_matrices
from memo.units import GIB

ExportDtype = Literal["bf16", "fp16", "fp32", "fp64"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
MAX_SHARD_BYTES = 5 * GIB
_REMEDY = "give the config.toml of the run that saved it with --config"


@dataclass(frozen=True)
class Exported:
    path: Path
    architecture: str
    files: list[str]
    num_bytes: int
    companions: list[str]

    @property
    def content(self) -> str:
        return f"an adapter of {self.architecture}" if self.files == [ADAPTER_FILE] else self.architecture


@dataclass(frozen=True)
class _Theirs:
    """One tensor of the Hugging Face model: its shape and dtype, and the tensors of memo that are its parts."""

    shape: Shape
    dtype: torch.dtype
    parts: dict[str, tuple[HuggingFacePlace, Shape]]

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export_checkpoint(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: ExportDtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    tokenizer: str | Path | None = None,
    config_file: str | Path | None = None,
    verify: bool = True,
    merge_adapters: bool = False,
    base: str | Path | None = None,
) -> Exported:
    """Write OUT: config.json, the weights, and the tokenizer's files if they are known; for a LoRA run only the
    adapters, in the files of PEFT. The arguments are the options of `memo export` (memo.cli.export).

    Raises CheckpointError, and ConfigError for a model that no architecture of Hugging Face has. An export that fails
    is removed.
    """
    final = resolve_checkpoint(checkpoint)
    config = _run_config(final, config_file)
    target = Path(out)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise CheckpointError(f"--out {target} exists and is not empty: choose another directory, or remove it")
    if tokenizer is not None:
        check_tokenizer(Path(tokenizer), config.model)
    chosen = dtype or config.training.params_dtype
    torch_dtype = None if chosen is None else DTYPES[chosen]
    name = None if torch_dtype is None else str(torch_dtype).removeprefix("torch.")
    ancestor = None if model_file(_companions(final), CONFIG_FILE) is None else read_config(_companions(final))
    theirs = write_config(config.model, _num_positions(config), name, ancestor)
    state, index = open_checkpoint(final, verify=verify)
    _check_model(final, state, config)
    source = RunWeights(final, index, verify, None if base is None else open_pretrained(base, config))
    has_adapters = config.model.lora_rank > 0
    if merge_adapters and not has_adapters:
        raise ConfigError(f"--merge-adapters: {final} was trained without LoRA: leave the flag out")
    tensors: dict[str, _Theirs] = {}
    if merge_adapters or not has_adapters:
        check_base(final, state, base)
        tensors = _their_tensors(source, config, theirs, torch_dtype)
    rest = None if theirs.wrapper is None else _rest(final)
    place = Path(os.path.abspath(target))  # because "." has no name
    partial = place.with_name(f"{place.name}.partial")
    if os.path.lexists(partial):
        raise CheckpointError(
            f"{partial} is there already, of an export that was killed, or by another hand: remove it, or choose "
            "another --out"
        )
    with writing(f"--out {target}", CheckpointError):
        partial.mkdir(parents=True)
        try:
            copy_tokenizer(_companions(final) if tokenizer is None else Path(tokenizer), partial)
            answers = _copy_template(final, partial)
            if has_adapters and not merge_adapters:
                files, num_bytes = _write_adapters(source, partial, config, theirs, ancestor, dtype)
            else:
                _write_json(partial / CONFIG_FILE, add_token_ids(partial, theirs.file, answers=answers))
                files, num_bytes = _write_weights(source, config, partial, tensors, max_shard_bytes, rest)
            companions = [name for name in COMPANIONS if (partial / name).exists()]
            if place.exists():
                place.rmdir()
            os.rename(partial, place)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return Exported(target, theirs.file["architectures"][0], files, num_bytes, companions)


def export_run(config: RunConfig, out: str | Path, *, alone: bool) -> Exported:
    """Export a run that has just ended. Adapters are written in PEFT's files if they may be `alone` and no other part
    of the model has changed; otherwise they are merged."""
    model, directory = config.model, str(config.checkpoint.pretrained_checkpoint)
    merges = model.lora_rank > 0 and not (alone and stand_alone(config, read_config(directory)))
    base = frozen_from(config) if merges or not model.lora_rank else None
    return export_checkpoint(str(config.checkpoint.save), out, merge_adapters=merges, base=base)


def _run_config(final: Path, given: str | Path | None) -> RunConfig:
    path = Path(given) if given is not None else final.parent / RUN_CONFIG
    if given is None and not path.exists():
        raise CheckpointError(
            f"{path} does not exist, so the shape of the model is not known: give the run's with --config RUN.TOML"
        )
    values = read_toml(path)
    values.pop("model", None)
    config = RunConfig().override(values, source=f"--config {path}")
    if config.model.vocab_size is None:
        raise ConfigError(f"--config {path} has no vocab_size: give the config.toml that the run wrote")
    return config


def _check_model(final: Path, state: RunState, config: RunConfig) -> None:
    """Raises CheckpointError if the configuration does not describe the saved model."""
    for name, values in differences(state.model, model_identity(config)).items():
        raise CheckpointError(
            f"{final}: the model that was saved had another {name} than its config.toml says ({values}): {_REMEDY}"
        )


def _num_positions(config: RunConfig) -> int:
    """The sequence length for which the model is made, or the training's sequence length if it is longer."""
    if config.model.position_embedding_type == "learned_absolute":
        return config.model.position_rows(config.data.seq_length)
    known = config.model.max_position_embeddings
    return max(known or 0, config.data.seq_length)


def _companions(final: Path) -> Path:
    """The folder in which the run has kept files of its initial model and data. Raises CheckpointError for a link that
    leads out of the run's directory."""
    return path_within(final.parent, COMPANION_DIR)


def _rest(final: Path) -> Path:
    """The file with the tensors around a text model. Raises CheckpointError if it is missing."""
    folder = _companions(final)
    found = model_file(folder, REST_FILE)
    if found is None:
        raise CheckpointError(
            f"{folder / REST_FILE} is missing, with the part of the model that sees images: import the model that this "
            "one was made from with `memo import`, and copy the file from its hugging_face folder"
        )
    return found


def _their_tensors(
    source: RunWeights, config: RunConfig, theirs: HuggingFaceModel, dtype: torch.dtype | None
) -> dict[str, _Theirs]:
    """The tensors to write, in the model's order. Raises CheckpointError if the checkpoint lacks any."""
    shapes = global_shapes(config.model, config.model.position_rows(config.data.seq_length))
    stored = source.stored
    adapted = adapted_matrices(config.model)
    own = {name: tensor for name, tensor in stored.items() if name not in set(sum(map(adapter_names, adapted), ()))}
    check_shapes(str(source.final), shapes, own, _REMEDY)
    found: dict[str, _Theirs] = {}
    wrapper = None if theirs.wrapper is None else WRAPPERS[theirs.wrapper["model_type"]]
    stacked = wrapper is not None and wrapper.stacked
    for name, place in places(config.model, theirs.model_type, shapes, stacked=stacked).items():
        of_parameters = None if name.endswith(EXPERT_BIAS) else dtype
        new = _Theirs(place.whole_shape(shapes[name]), of_parameters or stored[name].torch_dtype, {})
        their_name = place.name if wrapper is None else renamed(place.name, wrapper.names) or place.name
        found.setdefault(their_name, new).parts[name] = (place, shapes[name])
    return found


def _write_adapters(
    source: RunWeights,
    folder: Path,
    config: RunConfig,
    theirs: HuggingFaceModel,
    base: HuggingFaceModel | None,
    dtype: ExportDtype | None,
) -> tuple[list[str], int]:
    """Write adapters in PEFT's files; `dtype` None: in their stored dtype. Returns the files' names and their bytes."""
    check_alone(config, base)
    naming = NAMINGS[0] if theirs.wrapper is None else MODULES
    modules, stored = adapted_modules(config, theirs.model_type), source.stored

    def dtype_of(name: str) -> torch.dtype:
        return DTYPES[dtype] if dtype is not None else stored[name].torch_dtype

    tensors = exported_adapters(config.model, modules, naming, dtype_of, source.fill)
    write_safetensors(folder / ADAPTER_FILE, tensors)
    _write_json(folder / ADAPTER_CONFIG, adapter_config(config, modules, naming))
    return [ADAPTER_FILE], sum(tensor.nbytes for tensor in tensors.values())


def _write_weights(
    source: RunWeights,
    config: RunConfig,
    folder: Path,
    tensors: Mapping[str, _Theirs],
    max_shard_bytes: int,
    rest: Path | None,
) -> tuple[list[str], int]:
    """Write the weights; `rest` has further tensors and becomes the last file. Returns the files' names and bytes."""
    shards = _pack(tensors, max_shard_bytes)
    others = {} if rest is None else tensor_bytes(rest)
    count = len(shards) + (rest is not None)
    files = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)] if count > 1 else [SINGLE_FILE]
    for file, names in zip(files, shards, strict=False):
        # No variable holds the tensors, so the tensors of one file are freed before those of the next are read.
        write_safetensors(folder / file, _read(source, config.model, {name: tensors[name] for name in names}))
    if rest is not None:
        copy_file(rest, folder / files[-1])
        shards.append(list(others))
    total_bytes = sum(tensor.num_bytes for tensor in tensors.values()) + sum(others.values())
    if count > 1:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in names}
        _write_json(folder / INDEX_FILE, {"metadata": {"total_size": total_bytes}, "weight_map": weight_map})
    return files, total_bytes


def _pack(tensors: Mapping[str, _Theirs], max_shard_bytes: int) -> list[list[str]]:
    """The names of the tensors of each file, in order; a tensor above the limit gets a separate file."""
    shards: list[list[str]] = []
    free_bytes = -1
    for name, tensor in tensors.items():
        if not shards or tensor.num_bytes > free_bytes:
            shards.append([])
            free_bytes = max_shard_bytes
        shards[-1].append(name)
        free_bytes -= tensor.num_bytes
    return shards


def _read(source: RunWeights, model: ModelConfig, tensors: Mapping[str, _Theirs]) -> dict[str, Tensor]:
    """Read tensors of the Hugging Face model, through views with memo's shapes, and add adapters to them."""
    whole = {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in tensors.items()}
    ours = {
        name: GlobalTensor(shape, tensor.dtype, place.parts_of(shape, whole[theirs]))
        for theirs, tensor in tensors.items()
        for name, (place, shape) in tensor.parts.items()
    }
    source.fill(ours)
    for name in set(adapted_matrices(model)) & set(ours):
        merge(model, name, ours[name].parts, source.stored[adapter_names(name)[0]].torch_dtype, source.fill)
    return whole


def _copy_template(final: Path, folder: Path) -> bool:
    """Copy the chat template of conversations that the run learned; returns whether there is one."""
    template = model_file(_companions(final), LEARNED_TEMPLATE)
    if template is None:
        return False
    copy_file(template, folder / TEMPLATE_FILE)
    return True


def _write_json(path: Path, content: object) -> None:
    replace_file(path, json.dumps(content, indent=2) + "\n")

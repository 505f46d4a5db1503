"""The model that a run trains, a preset or a directory in Hugging Face's format, and messages about other names."""

import dataclasses
import difflib
import os
from pathlib import Path

from memo.config.hugging_face import CONFIG_FILE, download_hint, hub_name, other_format, read_config
from memo.config.model import ModelConfig
from memo.config.presets import PRESETS, listed, preset_name
from memo.config.run import RunConfig
from memo.errors import ConfigError

_CHECKPOINT_MARKS = ("latest_checkpointed_iteration.txt", "run_state.json")
_ACCEPTED = f"a preset, one of {listed()}, or a directory with {CONFIG_FILE}"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")


def choose_model(config: RunConfig, model: str | os.PathLike[str] | ModelConfig) -> RunConfig:
    """`config` with the shape of `model`: itself, a preset's, or that of MODEL/config.json.

    A directory also becomes --pretrained-checkpoint, whose weights are the initial ones. Raises ConfigError
    for a name that is neither, and for a config.json that memo cannot train.
    """
    if isinstance(model, ModelConfig):
        return dataclasses.replace(config, model=model)
    if isinstance(model, RunConfig):
        raise ConfigError(
            "--model is a RunConfig, which is a whole run: give it as config=, as in Trainer(config=...), and as the "
            "model the name of a preset, the directory of a model of Hugging Face, or a ModelConfig"
        )
    name = os.fspath(model) if isinstance(model, os.PathLike) else str(model)  # a TOML file may hold anything
    if name in PRESETS:
        return dataclasses.replace(config, model=PRESETS[name])
    if not os.path.lexists(Path(name, CONFIG_FILE)):
        raise model_error(name)
    chosen = dataclasses.replace(config, model=read_config(name).model)
    return chosen.override({"pretrained_checkpoint": name})


def model_error(name: str, *, config_is_enough: bool = False) -> ConfigError:
    """The error about `name`, which is no preset and no directory with a config.json; `config_is_enough`: whether only
    the shape is asked for, which config.json has, and not the weights."""
    return ConfigError(f"--model {name}: {model_problem(name, config_is_enough=config_is_enough)}")


def preset(name: str) -> ModelConfig:
    """The preset of this name, in letters of any case. Raises ConfigError."""
    known = preset_name(str(name))
    if known is None:
        raise model_error(str(name))
    return PRESETS[known]


def check_planned_model(name: str) -> None:
    """Raises ConfigError for a name that is no preset, in letters of any case, no config.json and no directory with
    one.

    A run takes presets by their exact name alone, lest it begins with new weights where a directory was meant.
    """
    if preset_name(name) is None and not name.endswith(".json") and not os.path.lexists(Path(name, CONFIG_FILE)):
        raise model_error(name, config_is_enough=True)


def model_problem(name: str, *, config_is_enough: bool = False) -> str:
    """What is wrong with a name that is no model, and what to do; arguments as in `model_error`."""
    path = Path(name)
    try:
        if path.is_dir():
            return _of_directory(path)
        if path.is_file():
            return _of_file(path)
    except PermissionError:
        raise
    except (OSError, ValueError):  # a name that no file can have
        pass
    near = difflib.get_close_matches(name.rpartition("/")[2].lower(), PRESETS, n=1, cutoff=0.5)
    if hub_name(name):
        what, enough = (f"{name} {CONFIG_FILE}", ", which is enough to plan,") if config_is_enough else (name, "")
        preset = f"; or take the shape alone, with new weights, from the preset {near[0]}" if near else ""
        return (
            f"neither a preset nor a directory here, and memo reads local files: {download_hint(name, what)}{enough} "
            f"and give the same command again{preset}"
        )
    if os.sep in name or name in (".", ".."):
        return f"there is no such directory: {download_hint(name)}, or give a directory with {CONFIG_FILE}"
    near = near or difflib.get_close_matches(name.lower(), PRESETS, n=1, cutoff=0.3)
    hint = f"did you mean '{near[0]}'? " if near else ""
    return (
        f"no such preset: {hint}use one of {listed()}; or a model's directory, from `hf download ORG/NAME "
        "--local-dir DIR`"
    )


def _of_directory(path: Path) -> str:
    """What to do about a directory without a config.json."""
    if any((path / mark).exists() for mark in _CHECKPOINT_MARKS):
        return (
            f"that is a checkpoint of memo, not a model of Hugging Face: go on from it with "
            f"--config {path}/config.toml --load {path}, or write it as one with `memo export {path} --out DIR`"
        )
    if other := other_format(path):
        return other
    inside = sorted(child.parent for child in path.glob(f"*/{CONFIG_FILE}"))
    if inside:
        return f"it has no {CONFIG_FILE}, but {inside[0]} has: give --model {inside[0]}"
    return f"it has no {CONFIG_FILE}: give {_ACCEPTED}, which `hf download ORG/NAME --local-dir DIR` makes"


def _of_file(path: Path) -> str:
    if other := other_format(path):
        return other
    if path.suffix == ".toml":
        return f"that is a file of flags: give it as --config {path}"
    if path.name == CONFIG_FILE or path.suffix in _WEIGHTS:
        beside = path.parent
        if path.suffix in _WEIGHTS[1:]:
            return f"memo reads *.safetensors with their {CONFIG_FILE}: save the model so, and give its directory"
        return f"that is one file of a model: give its directory, --model {beside}"
    if path.suffix in (".jsonl", ".txt", ".idx"):
        return f"that is data, not a model: it belongs to --data-path, and --model takes {_ACCEPTED}"
    return f"that is a file: give {_ACCEPTED}"

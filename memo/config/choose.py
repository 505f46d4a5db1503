"""Which model a run trains: a preset by name, or a directory in Hugging Face's format."""

import dataclasses
import os
from pathlib import Path

from memo.config.hugging_face import CONFIG_FILE, read_config
from memo.config.model import ModelConfig
from memo.config.model_name import model_error
from memo.config.presets import PRESETS, preset
from memo.config.run import RunConfig
from memo.errors import ConfigError


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
        return dataclasses.replace(config, model=preset(name))
    if not os.path.lexists(Path(name, CONFIG_FILE)):
        raise model_error(name)
    chosen = dataclasses.replace(config, model=read_config(name).model)
    return chosen.override({"pretrained_checkpoint": name})

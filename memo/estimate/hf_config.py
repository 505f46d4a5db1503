"""A config.json of Hugging Face as a `ModelShape`."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from memo.artifacts.reading import Source, read_json_object
from memo.config.hugging_face import CONFIG_FILE, counted_model
from memo.errors import ConfigError
from memo.spec.shapes import ModelShape, shape_of


def shape_from_hf(values: Mapping[str, Any], name: str) -> ModelShape:
    """The shape that the keys of a config.json describe; `name` is the name of the shape, and of the file in messages.

    Raises the ConfigErrors of `counted_model`.
    """
    model, beyond = counted_model(values, name)
    return replace(shape_of(model, name, 0), **beyond)


def read_hf_config(path: str | Path) -> ModelShape:
    """Read a config.json, or the one in a directory. Raises the ConfigErrors of `shape_from_hf`, and one for a file
    that cannot be read."""
    file = Path(path)
    if os.path.isdir(file):
        file = file / CONFIG_FILE
    source = Source(str(file), ConfigError, "give the path of a config.json of Hugging Face")
    return shape_from_hf(read_json_object(file, source), str(file))

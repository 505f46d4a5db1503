"""`memo import`: writes a Hugging Face directory as a checkpoint of memo."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from memo.artifacts.reading import is_there
from memo.config.command_line import parse_options
from memo.config.flag import Flag
from memo.config.hugging_face import download_hint, hub_name, other_format
from memo.config.presets import PRESETS
from memo.config.require import require
from memo.units import format_count

EXAMPLES = ("memo import Llama-3.1-8B --out checkpoints/llama",)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Write a model of Hugging Face as a checkpoint for `memo train --load`; docs/models.md has the families.

    At most one file of the model is in memory at a time. To train without this step, give the directory to
    `memo train --model`.
    """

    directory: Annotated[str, Flag(metavar="DIR", is_positional=True)]
    """Directory with config.json and *.safetensors, as `hf download ORG/NAME --local-dir DIR` makes it."""
    out: str
    """Directory for the checkpoint."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a model that memo cannot train, and for files that cannot be read or written."""
    options = parse_options(_Options, argv, prog="memo import", examples=EXAMPLES)
    directory = options.directory
    require(
        directory not in PRESETS or os.path.isdir(directory),
        f"memo import {directory}: that is a preset, a shape without weights: give the directory of a model, or train "
        f"new weights with `memo train --model {directory}`",
    )
    name = directory if hub_name(directory) else "ORG/NAME"
    missing = f"there is no such directory, and memo reads local files: {download_hint(directory, name)}"
    require(
        is_there(directory) and os.path.isdir(directory),
        f"memo import {directory}: {other_format(directory) or missing}",
    )
    from memo.checkpoint.directory import has_checkpoint
    from memo.checkpoint.hugging_face.importer import import_checkpoint

    require(
        not has_checkpoint(directory),
        f"memo import {directory}: that is a checkpoint of memo already: leave this step out",
    )
    imported = import_checkpoint(directory, options.out)
    file, out = shlex.quote(f"{options.out}/config.toml"), shlex.quote(options.out)
    print(
        f"{imported.path}: {format_count(imported.num_weights)} weights; beside them {', '.join(imported.companions)}\n"
        f"train on: memo train --config {file} --load {out} --data-path PREFIX"
    )

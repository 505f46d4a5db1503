"""`memo import`: a Hugging Face directory as a checkpoint of memo."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from tyro.conf import Positional, arg

from memo.units import format_count


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Write a Llama, Mistral, Qwen2, Qwen3, GPT-2 or StarCoder2 as a checkpoint that `memo train --load` reads.

    At most one file of the model is in memory at a time. To train without this step, give the directory to
    `memo train --model`.
    """

    directory: Annotated[Positional[str], arg(metavar="DIR")]
    """Directory with config.json and *.safetensors, as `hf download ORG/NAME --local-dir DIR` makes it."""
    out: str
    """Directory for the checkpoint."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a model that memo cannot train, and for files that cannot be read or written."""
    options = tyro.cli(_Options, args=argv, prog="memo import")
    from memo.checkpoint.hugging_face import import_checkpoint

    imported = import_checkpoint(options.directory, options.out)
    print(
        f"{imported.path}: {format_count(imported.num_weights)} weights; beside them {', '.join(imported.companions)}\n"
        f"train on: memo train --config {options.out}/config.toml --load {options.out} --data-path PREFIX"
    )

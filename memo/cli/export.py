"""`memo export`: writes a checkpoint of memo as a Hugging Face directory."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from memo.artifacts.fields import PositiveFloat
from memo.config.command_line import parse_options
from memo.config.flag import Flag
from memo.config.hugging_face import CONFIG_FILE
from memo.config.require import require
from memo.units import GIB, format_bytes

EXAMPLES = (
    "memo export runs/a --out Llama-3.1-8B-mine",
    "memo export runs/lora --out Llama-3.1-8B-mine --merge-adapters",
)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Write the newest checkpoint so that AutoModelForCausalLM.from_pretrained loads it."""

    checkpoint: Annotated[str, Flag(metavar="CKPT", is_positional=True)]
    """Directory that --save or `memo import` wrote, or one iter_... in it."""
    out: str
    """Directory to write; it must not exist or be empty."""
    dtype: Literal["bf16", "fp16", "fp32", "fp64"] | None = None
    """Dtype of the weights; default: the dtype in which the run computed, or unchanged after `memo import`."""
    max_shard_gib: PositiveFloat = 5.0
    """Weights are cut into files of at most this size; one file at a time is in memory."""
    tokenizer: str | None = None
    """Directory with the tokenizer's files, or a tokenizer.json; default: the tokenizer of the run."""
    merge_adapters: bool = False
    """Write the whole model of a LoRA run with its adapters added to the weights; default: only the adapters, in the
    files of PEFT."""
    base: Annotated[str | None, Flag(metavar="DIR")] = None
    """Hugging Face directory that a run with frozen weights started from; needed to write the whole model, because
    checkpoints lack frozen weights."""
    verify_checkpoint: bool = True
    """Compare checksums with those that were written; off: accept a damaged checkpoint."""
    config: Annotated[str | None, Flag(metavar="RUN.TOML")] = None
    """Configuration of the run that saved the checkpoint; default: CKPT/config.toml."""


def main(argv: Sequence[str]) -> None:
    """Raises MemoError for a model without an architecture of Hugging Face, and for files that cannot be read or
    written."""
    options = parse_options(_Options, argv, prog="memo export", examples=EXAMPLES)
    from memo.checkpoint.directory import has_checkpoint
    from memo.checkpoint.hugging_face.exporter import export_checkpoint

    path = options.checkpoint
    problem = "it holds no whole checkpoint" if os.path.isdir(path) else "there is no such directory"
    if os.path.exists(os.path.join(path, CONFIG_FILE)):
        problem = "that is a model of Hugging Face already"
    require(
        has_checkpoint(path),
        f"memo export {path}: {problem}: give the directory that a run named with --save, or that `memo import` wrote",
    )
    exported = export_checkpoint(
        path,
        options.out,
        dtype=options.dtype,
        max_shard_bytes=int(options.max_shard_gib * GIB),
        tokenizer=options.tokenizer,
        config_file=options.config,
        verify=options.verify_checkpoint,
        merge_adapters=options.merge_adapters,
        base=options.base,
    )
    tokenizer = ", ".join(exported.companions) or "no tokenizer, as the run knows none (give --tokenizer)"
    print(
        f"{exported.path}: {exported.content}, {format_bytes(exported.num_bytes)} in {len(exported.files)} "
        f"file{'s' * (len(exported.files) > 1)}; beside them {tokenizer}"
    )

"""Command-line flags of a run: defaults < preset < TOML < flags."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from memo.artifacts.reading import is_there, shown
from memo.config import command_line, help_text
from memo.config.check_fields import check_options
from memo.config.flag import Flag
from memo.config.flag_table import CommandLine, FlagGroup
from memo.config.identity import differences, model_facts
from memo.config.launching import check_ranks
from memo.config.model import CHOICES_OF_TRAINED, ModelConfig
from memo.config.model_name import choose_model
from memo.config.presets import PRESETS
from memo.config.run import RUN_CONFIG, RunConfig, read_toml
from memo.config.simulated_world import with_simulated_axes
from memo.errors import ConfigError, exit_on_error, is_reporting_rank

MEGATRON_SPELLINGS = {
    "--bf16": ("--params-dtype", "bf16"),
    "--swiglu": ("--activation", "swiglu"),
    "--disable-bias-linear": ("--no-add-bias-linear",),
    "--recompute-activations": ("--recompute-granularity", "selective"),
    "--use-rotary-position-embeddings": ("--position-embedding-type", "rope"),
}
"""Flags of Megatron-LM's pretrain_gpt.py -> the flags of memo that mean the same."""

ALWAYS_ON = (
    "--sequence-parallel",
    "--use-distributed-optimizer",
    "--use-flash-attn",
    "--use-mcore-models",
    "--group-query-attention",
)
"""Flags of Megatron-LM for what memo does in any case; refused with that hint."""

EVERYONE_NEEDS = (
    "model",
    "data_path",
    "seq_length",
    "global_batch_size",
    "train_iters",
    "lr",
    "tensor_model_parallel_size",
    "context_parallel_size",
    "save",
    "load",
)
"""The flags that --help of a run explains; it lists all others by name."""

ABOUT = "Train a model, on one rank or under torchrun."
EXAMPLES = (
    "memo train --model llama-tiny --mock-data --seq-len 2K --train-iters 20",
    "memo data demo data/demo",
    "memo train --model llama-tiny --data-path data/demo --seq-len 2K --train-iters 200 --lr 3e-3 --save runs/a",
    "torchrun --nproc-per-node 8 -m memo train --model Llama-3.1-8B --tp 4 --cp 2 --seq-len 128K --data-path data/mine",
    "torchrun --nproc-per-node 8 -m memo train --config run.toml --save runs/b   # run.toml: memo plan --out run.toml",
)
_OF_RUN = ("vocab_size", "lora_alpha", "lora_use_rslora", *CHOICES_OF_TRAINED)
"""Fields of a model that a preset says nothing of."""


@dataclass(frozen=True)
class _Sources:
    """Sources of the values that no flag gives."""

    model: Annotated[
        str | None,
        Flag(metavar="NAME|DIR", help=f"One of {', '.join(PRESETS)}; or a Hugging Face directory, with its weights."),
    ] = None
    config: Annotated[
        str | None, Flag(metavar="RUN.TOML", help="Any fields, such as the config.toml of an earlier run.")
    ] = None


@dataclass(frozen=True)
class _NoOptions:
    """`memo train` has no flags besides those of a run."""


Options = TypeVar("Options")


def load_run(argv: Sequence[str], *, prog: str = "memo train") -> RunConfig:
    """Parse the flags and check them against the world's size; on any error a message and exit status 2."""
    config = parse_run(argv, prog=prog)
    with exit_on_error():
        config = with_simulated_axes(config)
        check_ranks(config, prog, argv)
    return config


def parse_run(argv: Sequence[str], *, prog: str) -> RunConfig:
    """The configuration that `argv` (without the program's name) asks for, not yet checked.

    Raises SystemExit: status 2 for a bad flag, value, preset or TOML file, after one message on standard error; status
    0 after --help. One rank of each node prints.
    """
    examples: tuple[str, ...] = EXAMPLES
    if not prog.startswith("memo "):  # a script that trains as `memo train` does
        script = (each.replace("-m memo train", prog) for each in EXAMPLES)
        examples = tuple(each.replace("memo train", f"python {prog}", each.startswith("memo")) for each in script)
    return parse_command(argv, _NoOptions(), prog=prog, about=ABOUT, examples=examples)[0]


def parse_command(
    argv: Sequence[str],
    options: Options,
    *,
    prog: str,
    about: str,
    examples: Sequence[str] = (),
    reads_run: bool = False,
) -> tuple[RunConfig, Options]:
    """As `parse_run`, for a command that takes the flags of a run and those of a dataclass of its own.

    Args:
        options: its defaults.
        about, examples: what --help says first.
        reads_run: where --config is not given, the configuration of the run that --load names takes its place.
    """
    words = [word for given in argv for word in MEGATRON_SPELLINGS.get(given.replace("_", "-"), (given,))]
    line = _line(prog, about, tuple(examples), options, RunConfig())
    wanted = help_text.request(words)
    if wanted is not None:
        if is_reporting_rank():
            print(help_text.render(_with_defaults(line, words, options), wanted))
        raise SystemExit(0)
    with exit_on_error():
        values = command_line.read_values(line, words)
        if reads_run and "config" not in values:
            values["config"] = _saved_config(values)
            _check_one_model(values)
        return _merged(values, options)


def _line(prog: str, about: str, examples: tuple[str, ...], options: Any, run: RunConfig) -> CommandLine:
    sections = [FlagGroup(kind, name, vars(getattr(run, name))) for name, kind in get_type_hints(RunConfig).items()]
    own = [FlagGroup(type(options), "", vars(options))] if dataclasses.fields(options) else []
    always = dict.fromkeys((flag[2:].replace("-", "_") for flag in ALWAYS_ON), "memo always does this: leave it out")
    groups = (*own, FlagGroup(_Sources, "start"), *sections)
    return CommandLine(prog, about, groups, examples, EVERYONE_NEEDS, always)


def _with_defaults(line: CommandLine, words: Sequence[str], options: Any) -> CommandLine:
    """For help: `line` with the values of the preset and the file that stand before --help, if they can be read."""
    at = next(at for at, word in enumerate(words) if word in help_text.REQUESTS)
    try:
        sources = command_line.read_values(line, words[:at])
        run = _merged({name: sources[name] for name in ("model", "config") if name in sources}, options)[0]
    except ConfigError:
        return line
    return _line(line.prog, line.about, line.examples, options, run)


def _saved_config(values: Mapping[str, Any]) -> str | None:
    """The configuration beside the checkpoints of --load, which names their directory or one iter_... in it; None if
    there is none.

    Raises ConfigError for a directory that does not exist, and for a configuration with a layer of the user's own that
    this command does not name: its file would be run.
    """
    load = values.get("load")
    if load is None:
        return None
    folder = Path(load).parent if Path(load).name.startswith("iter_") else Path(load)
    if not folder.exists():
        raise ConfigError(f"--load {load} does not exist: give the directory that an earlier run named with --save")
    file = folder / RUN_CONFIG
    if not is_there(file):
        return None
    layer = read_toml(file).get("custom_layer")
    if layer and "custom_layer" not in values:
        raise ConfigError(
            f"--load {load}: {file} has --custom-layer {shown(layer)}, whose file would be run: give that flag as well "
            "if you trust it"
        )
    return str(file)


def _check_one_model(values: Mapping[str, Any]) -> None:
    """Raises ConfigError for a --model that is not the model of the run in --load, which would be taken without a word.

    Another directory is right where the weights are read from it, beside those that the run trained; a run knows them
    by their content.
    """
    name, file = values.get("model"), values["config"]
    if name is None or file is None:
        return
    saved, fields = _defaults(_Sources(config=file)), {entry.name for entry in dataclasses.fields(ModelConfig)}
    own = saved.model
    given = choose_model(RunConfig(), name).replaced({key: values[key] for key in values if key in fields})
    weights, base = given.checkpoint.pretrained_checkpoint, saved.checkpoint.pretrained_checkpoint
    if weights is None:  # a preset
        of_run = {key: getattr(own, key) for key in _OF_RUN if key not in values}
        shape = dataclasses.replace(given.model, **of_run)
        is_own = not differences(model_facts(own), model_facts(shape))
    elif own.lora_rank or own.freeze or own.train_only:
        return
    else:
        is_own = base is not None and os.path.realpath(base) == os.path.realpath(weights)
    if not is_own:
        raise ConfigError(
            f"--model {name} is not the model of the run in --load {values['load']}, whose weights would be taken: "
            "leave out --model for the run, or --load for the model"
        )


def _merged(values: dict[str, Any], options: Options) -> tuple[RunConfig, Options]:
    """The run and the options of the command, from the values that flags give. Raises ConfigError."""
    values = dict(values)
    run = _defaults(_Sources(values.pop("model", None), values.pop("config", None)))
    own = {name: values.pop(name) for name in vars(options) if name in values}
    options = dataclasses.replace(options, **own)  # type: ignore[type-var]
    check_options(options)
    return run.replaced(values), options


def _defaults(sources: _Sources) -> RunConfig:
    values = read_toml(sources.config) if sources.config is not None else {}
    named_in_file = values.pop("model", None)
    name = sources.model if sources.model is not None else named_in_file
    config = RunConfig()
    if name is not None:
        config = choose_model(config, name)
    if sources.model is not None and config.checkpoint.pretrained_checkpoint is not None:
        values["pretrained_checkpoint"] = config.checkpoint.pretrained_checkpoint  # a flag of the same directory
    return config.override(values, source=f"--config {sources.config}")

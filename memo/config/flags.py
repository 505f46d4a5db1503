"""Command-line flags of a run: defaults < preset < TOML < flags.

Every flag is a field name with dashes (underscores work too); tyro makes parser and help from the
dataclasses. A refused flag, file or configuration ends with one message and exit status 2.
"""

import contextlib
import dataclasses
import difflib
import io
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Generic, TypeVar

import tyro
from tyro.conf import OmitArgPrefixes, arg

from memo.config.checks import check
from memo.config.choose import choose_model
from memo.config.presets import PRESETS
from memo.config.run import SHORT_NAMES, RunConfig, read_toml
from memo.config.simulated import run_world_size, with_simulated_axes
from memo.errors import ConfigError, exit_on_error, is_reporting_rank

MEGATRON_SPELLINGS = {
    "--bf16": ("--params-dtype", "bf16"),
    "--swiglu": ("--activation", "swiglu"),
    "--disable-bias-linear": ("--no-add-bias-linear",),
}
"""Flags of Megatron-LM's pretrain_gpt.py that say the same as one of ours."""

ALWAYS_ON = ("--sequence-parallel", "--use-distributed-optimizer", "--use-flash-attn", "--use-mcore-models")
"""Flags of Megatron-LM for what memo does in any case; refused with that hint."""


@dataclass(frozen=True)
class _Sources:
    """Where values come from that no flag gives: defaults < preset < TOML < flags."""

    model: Annotated[
        str | None,
        arg(metavar="NAME|DIR", help=f"One of {', '.join(PRESETS)}; or a Hugging Face directory, with its weights."),
    ] = None
    config: Annotated[
        str | None, arg(metavar="RUN.TOML", help="Any fields, such as the config.toml of an earlier run.")
    ] = None


@dataclass(frozen=True)
class _NoOptions:
    """Of `memo train`: a run has no others."""


Options = TypeVar("Options")


@dataclass(frozen=True)
class _CommandLine(Generic[Options]):
    # Empty names: help says "model options", not "run.model options".
    run: Annotated[RunConfig, arg(name="")]
    options: Annotated[Options, arg(name="")]
    sources: _Sources = field(default_factory=_Sources)


def load_run(argv: Sequence[str], *, prog: str = "memo train") -> RunConfig:
    """Parse the flags and check them against the world's size; on any error a message and exit status 2."""
    config = parse_run(argv, prog=prog, print_errors=is_reporting_rank())
    with exit_on_error(is_reporting_rank()):
        config = with_simulated_axes(config)
        check(config, run_world_size(config.parallel))
    return config


def parse_run(argv: Sequence[str], *, prog: str, print_errors: bool = True) -> RunConfig:
    """The configuration that `argv` (without the program's name) asks for, not yet checked.

    Raises SystemExit: status 2 for a bad flag, value, preset or TOML file, with one message on
    standard error if `print_errors`; status 0 after --help.
    """
    about = "Train a model, on one rank or under torchrun."
    return parse_command(argv, _NoOptions(), prog=prog, about=about, print_errors=print_errors)[0]


def parse_command(
    argv: Sequence[str], options: Options, *, prog: str, about: str, print_errors: bool = True
) -> tuple[RunConfig, Options]:
    """As `parse_run`, for a command that takes the flags of a run and those of a dataclass of its own.

    Args:
        options: its defaults.
        about: what --help says first.
    """
    args = [word for given in argv for word in MEGATRON_SPELLINGS.get(given.replace("_", "-"), (given,))]
    with exit_on_error(print_errors), _console(print_errors):
        # Two passes: preset and file become the defaults that the flags override and --help shows.
        sources, _ = tyro.cli(OmitArgPrefixes[_Sources], args=args, prog=prog, add_help=False, return_unknown_args=True)
        line, unknown = tyro.cli(
            OmitArgPrefixes[_CommandLine[type(options)]],  # type: ignore[misc]
            default=_CommandLine(_defaults(sources), options, sources),
            args=args,
            prog=prog,
            description=about,
            return_unknown_args=True,
        )
        if unknown:
            raise ConfigError(_unknown_flag(unknown[0], prog, vars(options)))
    return line.run, line.options


@contextlib.contextmanager
def _console(is_open: bool) -> Iterator[None]:
    """tyro prints some errors even when told not to; a closed console swallows help as well."""
    if is_open:
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        yield


def _defaults(sources: _Sources) -> RunConfig:
    values = read_toml(sources.config) if sources.config is not None else {}
    named_in_file = values.pop("model", None)
    name = sources.model if sources.model is not None else named_in_file
    config = RunConfig()
    if name is not None:
        config = choose_model(config, name)
    return config.override(values, source=f"--config {sources.config}")


def _unknown_flag(word: str, prog: str, options: Iterable[str]) -> str:
    """The message about a word that no flag takes, with the nearest flag."""
    flag = word.split("=")[0].replace("_", "-")
    if not flag.startswith("--"):
        return f"'{word}' belongs to no flag: give flags as --name value, see `{prog} --help`"
    if flag in ALWAYS_ON:
        return f"there is no flag {flag}, because memo always does this: leave it out"
    near = difflib.get_close_matches(flag[2:], _known_names(options), n=1, cutoff=0.5)
    hint = f"did you mean --{near[0]}?" if near else f"see `{prog} --help`"
    return f"there is no flag {flag}: {hint}"


def _known_names(options: Iterable[str]) -> list[str]:
    names = ["model", "config", "layernorm_epsilon", *SHORT_NAMES, *options]
    for section in dataclasses.fields(RunConfig):
        for entry in dataclasses.fields(section.default_factory):  # type: ignore[arg-type]
            names += [entry.name, f"no_{entry.name}"] if entry.type is bool else [entry.name]
    return [name.replace("_", "-") for name in names] + [flag[2:] for flag in MEGATRON_SPELLINGS]

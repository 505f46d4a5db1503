"""Entry point of the console script `memo`. Imports no torch: help must answer at once."""

import difflib
import importlib
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from memo import __version__
from memo.errors import ConfigError, exit_on_error


@dataclass(frozen=True)
class Command:
    """A subcommand: `module`.`function`(argv) -> exit status. The module is imported only to run it."""

    name: str
    summary: str
    module: str
    function: str = "main"


COMMANDS = (
    Command("train", "train a model, on one rank or under torchrun", "memo.cli.train"),
    Command("profile", "measure one layer and the link, and print the plan for a run", "memo.cli.profile"),
    Command("finetune", "fine-tune a model on conversations, of which the answers alone count", "memo.cli.finetune"),
    Command("extend", "extend a model to longer texts than it was made for", "memo.cli.extend"),
    Command("evaluate", "loss by position of a model, and what it finds again", "memo.cli.evaluate"),
    Command("generate", "what a model writes after a prompt, or answers", "memo.cli.generate"),
    Command("estimate", "memory of a model on a layout, and whether it fits", "memo.cli.estimate"),
    Command("plan", "the fastest layout that fits, for a model on so many GPUs", "memo.cli.plan"),
    Command("hardware", "the machines that plans know by name, and how to describe another", "memo.cli.hardware"),
    Command("rehearse", "memory of a run and whether it fits, by its own steps, without a GPU", "memo.cli.rehearse"),
    Command("solve", "fixed addresses for the memory requests of an iteration", "memo.cli.solve"),
    Command("report", "draw training runs and memory plans", "memo.cli.report"),
    Command("doctor", "what this machine has for a run, what is missing, and what to do", "memo.cli.doctor"),
    Command("data", "build a corpus to train on", "memo.cli.data"),
    Command("import", "a Hugging Face model as a checkpoint of memo", "memo.cli.import_"),
    Command("export", "a checkpoint of memo as a Hugging Face model", "memo.cli.export"),
)
ABOUT = f"""memo {__version__}: train and extend LLMs at 64K to millions of tokens on few GPUs.

Begin with `memo doctor`, which says what this machine lacks, and `memo train --help`, which shows whole commands."""


_EXIT_INTERRUPTED = 128 + signal.SIGINT
"""The status that a shell shows of a program that Ctrl-C has ended."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: sys.argv[1:]) and return its exit status.

    Raises SystemExit for an error of memo's, after one message on standard error (memo.errors has the statuses).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with exit_on_error(needs_output=args[:1] not in (["train"], ["finetune"], ["extend"])):
            if args[:1] in (["--version"], ["version"]):
                print(f"memo {__version__}")
                return 0
            return dispatch("memo", ABOUT, COMMANDS, args)
    except KeyboardInterrupt:  # Ctrl-C; `memo train` listens for it itself, and saves
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return 0


def dispatch(prog: str, about: str, commands: Sequence[Command], argv: Sequence[str]) -> int:
    """Run the subcommand that argv[0] names; without one or with --help print the table of them.

    Raises ConfigError for an unknown name, with what memo has instead, or the nearest one.
    """
    if argv and argv[0] == "help":  # `memo help plan`, as other programs are asked
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print(_help(prog, about, commands), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    for command in commands:
        if command.name == argv[0]:
            function = getattr(importlib.import_module(command.module), command.function)
            status: int | None = function(argv[1:])
            return status or 0
    from memo.config.other_names import OTHER_COMMANDS  # here, because help is faster without

    names = [command.name for command in commands]
    near = difflib.get_close_matches(argv[0], names, n=1, cutoff=0.6)
    hint = f"did you mean '{prog} {near[0]}'?" if near else f"use one of {', '.join(names)}"
    hint = OTHER_COMMANDS.get(argv[0].lower().replace("_", "-"), hint)
    raise ConfigError(f"{prog}: there is no command '{argv[0]}': {hint}")


def _help(prog: str, about: str, commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    lines = [f"usage: {prog} COMMAND ...", "", about, "", "commands:", *rows, ""]
    return "\n".join([*lines, f"`{prog} COMMAND --help` tells the flags of one, and shows commands that work."])

"""Entry point of the console script `memo`. Does not import torch, because help must answer at once."""

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
    """A subcommand: `module`.`function`(argv) -> exit status. The module is imported only to run the subcommand."""

    name: str
    summary: str
    module: str
    function: str = "main"


COMMANDS = (
    Command("train", "train a model, on one rank or under torchrun", "memo.train.entry"),
    Command("profile", "measure one layer and the link, and print the plan for a run", "memo.cli.profile"),
    Command("finetune", "fine-tune a model on the answers of conversations, or on preferences", "memo.cli.finetune"),
    Command("extend", "extend a model to longer texts than it was made for", "memo.cli.extend"),
    Command("evaluate", "measure a model's loss by position, and its recall of needles", "memo.cli.evaluate"),
    Command("generate", "continue a prompt with a model, or answer it", "memo.cli.generate"),
    Command("estimate", "estimate the memory of a model on a layout, and whether it fits", "memo.cli.estimate"),
    Command("plan", "find the fastest layout that fits, for a model and a number of GPUs", "memo.cli.plan"),
    Command("hardware", "list the machines that plans know by name", "memo.cli.hardware"),
    Command("rehearse", "run steps on an emulated GPU, to see whether a run fits", "memo.cli.rehearse"),
    Command("solve", "give the memory requests of an iteration fixed addresses", "memo.cli.solve"),
    Command("report", "draw training runs and memory plans", "memo.cli.report"),
    Command("doctor", "check this machine for a run, and say what to mend", "memo.cli.doctor"),
    Command("data", "build a corpus to train on", "memo.cli.data"),
    Command("import", "write a Hugging Face model as a checkpoint of memo", "memo.cli.import_"),
    Command("export", "write a checkpoint of memo as a Hugging Face model", "memo.cli.export"),
)
ABOUT = f"""memo {__version__}: train and extend LLMs at 64K to millions of tokens on few GPUs.

Begin with `memo doctor`, which checks this machine, and `memo train --help`, which shows complete commands."""


_EXIT_INTERRUPTED = 128 + signal.SIGINT
"""The exit status that a shell reports for a program ended by Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: sys.argv[1:]) and return its exit status.

    Raises SystemExit for an error of memo, after one message on standard error (memo.errors has the statuses).
    """
    args = list(sys.argv[1:] if argv is None else argv)
    try:
        with exit_on_error(needs_output=args[:1] not in (["train"], ["finetune"], ["extend"])):
            if args[:1] in (["--version"], ["version"]):
                print(f"memo {__version__}")
                return 0
            return dispatch("memo", ABOUT, COMMANDS, args)
    except KeyboardInterrupt:  # Ctrl-C; `memo train` handles it itself, and saves
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    return 0


def dispatch(prog: str, about: str, commands: Sequence[Command], argv: Sequence[str]) -> int:
    """Run the subcommand that argv[0] names; without a name or with --help print the table of subcommands.

    Raises ConfigError for an unknown name, with memo's equivalent or the nearest name.
    """
    if argv and argv[0] == "help":  # `memo help plan`, as in other programs
        argv = [*argv[1:2], "--help"]
    if not argv or argv[0] in ("-h", "--help", "--help-all"):
        print(_help(prog, about, commands), file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    for command in commands:
        if command.name == argv[0]:
            function = getattr(importlib.import_module(command.module), command.function)
            status: int | None = function(argv[1:])
            return status or 0
    from memo.config.other_names import OTHER_COMMANDS  # imported here, because help is faster without it

    names = [command.name for command in commands]
    near = difflib.get_close_matches(argv[0], names, n=1, cutoff=0.6)
    hint = f"did you mean '{prog} {near[0]}'?" if near else f"use one of {', '.join(names)}"
    hint = OTHER_COMMANDS.get(argv[0].lower().replace("_", "-"), hint)
    raise ConfigError(f"{prog}: there is no command '{argv[0]}': {hint}")


def _help(prog: str, about: str, commands: Sequence[Command]) -> str:
    width = max(len(command.name) for command in commands)
    rows = [f"  {command.name:<{width}}  {command.summary}" for command in commands]
    lines = [f"usage: {prog} COMMAND ...", "", about, "", "commands:", *rows, ""]
    return "\n".join([*lines, f"`{prog} COMMAND --help` prints the flags of a command, with examples."])

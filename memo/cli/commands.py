"""Dispatch to subcommands by name: a table of names, summaries and modules, and help made of it."""

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from memo.errors import ConfigError


@dataclass(frozen=True)
class Command:
    """A subcommand: `module`.`function`(argv) -> exit status. The module is imported only to run it."""

    name: str
    summary: str
    module: str
    function: str = "main"


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

"""Entry point of the console script `memo`. Imports no torch: help must answer at once."""

import os
import select
import signal
import sys
from collections.abc import Sequence
from typing import TextIO

from memo import __version__
from memo.cli.commands import Command, dispatch
from memo.errors import exit_on_error

COMMANDS = (
    Command("train", "train a model, on one rank or under torchrun", "memo.cli.train"),
    Command("profile", "measure one layer and the link, and print the plan for a run", "memo.cli.profile"),
    Command("evaluate", "loss by position of a model, and what it finds again", "memo.cli.evaluate"),
    Command("generate", "what a model writes after a prompt", "memo.cli.generate"),
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
_EXIT_PIPE = 128 + signal.SIGPIPE
"""The status that a shell shows of a program such as `cat` when the reader of its output goes away."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command (default: sys.argv[1:]) and return its exit status.

    Where nobody reads the output any more, as in `memo solve ... | head`, the command ends quietly. Raises SystemExit
    for an error of memo's, after one message on standard error (memo.errors has the statuses).
    """
    try:
        try:
            return _run(list(sys.argv[1:] if argv is None else argv))
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:  # Ctrl-C; `memo train` listens for it itself, and saves
        print("interrupted", file=sys.stderr)
        return _EXIT_INTERRUPTED
    except BrokenPipeError:
        left = [stream for stream in (sys.stdout, sys.stderr) if _is_unread(stream)]
        if not left:  # it is another pipe that broke
            raise
        for stream in left:  # Python would fail again when it flushes the rest at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return _EXIT_PIPE


def _run(args: list[str]) -> int:
    if args[:1] in (["--version"], ["version"]):
        print(f"memo {__version__}")
        return 0
    with exit_on_error():
        return dispatch("memo", ABOUT, COMMANDS, args)


def _is_unread(stream: TextIO) -> bool:
    """Whether it is a pipe without a reader."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file of the system, or closed
        return False
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are told in any case
    return any(event & select.POLLERR for _, event in poll.poll(0))

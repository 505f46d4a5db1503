"""Commands that texts of memo suggest, and whether memo accepts them."""

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from memo.cli import extend, finetune, profile, rehearse
from memo.cli.main import main
from memo.config import command_line, evaluation_run
from memo.config.flag_table import CommandLine
from memo.config.flags import load_run, parse_run

_COMMAND = r"(?:(?:python -m )?memo|torchrun|python examples/\w+\.py) (?!COMMAND)"


class Parsed(Exception):
    """The flags of a command have been read."""


def suggested(text: str) -> list[str]:
    """Return the command lines in a text of memo: between backticks, or after the ': ' of a label."""
    quoted = re.findall(rf"`({_COMMAND}[^`]*)`", text)
    labelled = re.findall(rf"^(?!error)[a-z][a-z ]*: ({_COMMAND}.*)$", text, re.MULTILINE)
    started = re.findall(r"^error: .*: (torchrun .*)$", text, re.MULTILINE)
    return quoted + labelled + started


def words_of(line: str) -> tuple[list[str], int]:
    """Return the arguments of memo in a command line, and the number of ranks that it starts."""
    words, ranks = shlex.split(line.partition(" > ")[0], comments=True), 1
    while "=" in words[0]:
        words.pop(0)
    if words[0] == "torchrun":
        for flag in ("--nproc-per-node", "--nnodes"):
            ranks *= int(words[words.index(flag) + 1]) if flag in words else 1
    if "memo" in words:
        return words[words.index("memo") + 1 :], ranks
    script = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[script:], ranks


@contextmanager
def only_parsed() -> Iterator[None]:
    """Let commands raise Parsed once their usual parsers have read their flags."""
    real = command_line.read_values

    def read(line: CommandLine, argv: Sequence[str]) -> dict[str, Any]:
        values = real(line, argv)
        if len(line.groups) > 1:
            return values  # parse_command still looks at the model and the file that are named
        raise Parsed

    def stop(*args: Any, **options: Any) -> Any:
        raise Parsed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command_line, "read_values", read)
        patch.setattr(profile, "check_ranks", stop)
        patch.setattr(evaluation_run, "check_values", stop)
        patch.setattr(profile, "_trace_on_paper", stop)
        patch.setattr(rehearse, "checked_run", stop)
        patch.setattr(extend, "_checked", stop)
        patch.setattr(finetune, "require_started", stop)
        yield


def check_parses(line: str, where: str) -> None:
    """Fail unless memo accepts the flags of a command line; `...` stands for flags that are left out.

    If the line only names a command, without a flag, its help is asked for.
    """
    line = line.replace("--model DIR", "--model llama-tiny")
    arguments, ranks = words_of(f"{line} --help" if re.fullmatch(r"memo( [a-z]+)+", line) else line)
    load: Callable[..., Any] = parse_run if "..." in arguments else load_run
    arguments = [word for word in arguments if word != "..."]
    with pytest.MonkeyPatch.context() as patch, only_parsed():
        patch.setenv("WORLD_SIZE", str(ranks))
        if arguments[0].endswith("pretrain_gpt.py"):
            arguments[0] = "train"
        if "--help" in arguments:
            _check_help(arguments)
        elif arguments[0] == "train":
            mock = ["--mock-data"] if not {"--data-path", "--mock-data", "--config"} & set(arguments) else []
            load([*arguments[1:], *mock], prog=f"{where}: {line}")
        else:
            with pytest.raises(Parsed):
                main(arguments)


def _check_help(arguments: Sequence[str]) -> None:
    try:
        assert main(arguments) == 0
    except SystemExit as ended:
        assert ended.code == 0

"""Write docs/flags.md: every flag of every command, from the dataclasses that are the flags (`make docs`)."""

import importlib
import inspect
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

from memo.artifacts.fields import Rule, field_types
from memo.cli.main import COMMANDS, Command, main
from memo.config import command_line
from memo.config.flag import LARGEST
from memo.config.flag_table import CommandLine, Entry, FlagGroup, dashed, texts_of
from memo.config.flags import ALWAYS_ON, MEGATRON_SPELLINGS
from memo.config.other_names import NAMES_ELSEWHERE, OTHER_COMMANDS, OTHER_NAMES, filled

PAGE = Path(__file__).with_name("flags.md")
INTRODUCTION = """# Flags

<!-- Written by docs/make_flags.py from the dataclasses that are the flags: change those, then run `make docs`. -->

`memo COMMAND --help` prints the same; of a command with hundreds of flags it explains those that everyone needs, with
`--help GROUP` those of one heading below, with `--help-all` all. Underscores work for dashes. Each flag of `memo train`
is also a key of a `--config` file, with underscores, at the top or under its section, and a keyword of `memo.Trainer`.

**Numbers.** TOKENS are lengths: 1K is 1,024, so `--seq-len 128K` is 131072, and 1M is 1,048,576. COUNT is of anything
else: 1K is 1,000, and 1M, 1B and 1T are its powers. BYTES may end in KiB, MiB or GiB. The same in `--config` files and
in Python, in quotes: `seq_length = "128K"`. A number that could be meant in both ways, such as `--vocab-size 32K`, is
refused: write it out.
"""


class _Parsed(Exception):
    """What a command takes, before it has read its flags."""


def page() -> str:
    """The whole of docs/flags.md."""
    sections = [INTRODUCTION, "\n".join(_run_tables())]
    for words, summary in _commands(COMMANDS):
        if words != ("train",):
            sections.append("\n".join(_command(words, summary)))
    return "\n".join(sections).rstrip() + "\n"


def _run_tables() -> Iterator[str]:
    """`memo train`: the sections of a run, and what other trainers say otherwise."""
    start, *sections = _captured(("train",)).groups
    yield "## memo train\n\nAlso of `examples/pretrain_gpt.py`.\n"
    yield from _table(start)
    for group in sections:
        yield f"\n### {group.name}\n\n{inspect.getdoc(group.kind)}\n"
        yield from _table(group)
    same = ", ".join(f"`{flag}` for `{' '.join(ours)}`" for flag, ours in MEGATRON_SPELLINGS.items())
    always = ", ".join(f"`{flag}`" for flag in ALWAYS_ON)
    yield f"\nAlso {same}, as in Megatron-LM. Refused, because memo always does it: {always}.\n"
    yield "\n### Names of other trainers\n\nNo flags, because many count something else. memo answers each with:\n"
    yield "| named there | answer |"
    yield "| --- | --- |"
    for text in dict.fromkeys(OTHER_NAMES.values()):
        names = ", ".join(f"`{name}`" for name, answer in OTHER_NAMES.items() if answer == text)
        yield f"| {names} | {filled(text, lambda field: f'`{dashed(field)}`')} |"
    yield "\n### Commands of other trainers\n\nAnswered as their flags are:\n"
    yield "| typed | answer |"
    yield "| --- | --- |"
    for command, answers in (("memo", OTHER_COMMANDS), *NAMES_ELSEWHERE.items()):
        for text in dict.fromkeys(answers.values()):
            flags = [name if command == "memo" else dashed(name) for name, answer in answers.items() if answer == text]
            yield f"| {', '.join(f'`{command} {flag}`' for flag in flags)} | {text} |"
    yield ""


def _command(words: Sequence[str], summary: str) -> Iterator[str]:
    own, *of_a_run = _captured(words).groups
    yield f"## memo {' '.join(words)}\n\n{summary[0].upper()}{summary[1:]}."
    if of_a_run:
        yield "Takes every flag of `memo train`, and:"
    yield ""
    yield from _table(own)
    yield ""


def _commands(commands: Sequence[Command], prefix: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Words and summary of each command; those of `memo data` each for itself."""
    for command in commands:
        words = (*prefix, command.name)
        nested = getattr(importlib.import_module(command.module), "COMMANDS", None)
        if nested and not prefix:
            yield from _commands(nested, words)
        else:
            yield words, command.summary


def _captured(words: Sequence[str]) -> CommandLine:
    """What a command takes, caught before it reads its flags."""
    real = command_line.read_values

    def catch(line: CommandLine, argv: Sequence[str]) -> dict[str, Any]:
        raise _Parsed(line)

    command_line.read_values = catch
    try:
        main([*words])
    except _Parsed as caught:
        line: CommandLine = caught.args[0]
        return line
    finally:
        command_line.read_values = real
    raise AssertionError(f"memo {' '.join(words)} parses no flags")


def _table(group: FlagGroup) -> Iterator[str]:
    yield "| flag | values | default | |"
    yield "| --- | --- | --- | --- |"
    texts = texts_of(group.kind)
    for entry in group.entries:
        marked = field_types(group.kind)[entry.field]
        cells = [_flag(entry), _values(entry, marked), _default(entry), texts.get(entry.field, "")]
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _flag(entry: Entry) -> str:
    names = [*entry.flags, *([f"--no-{entry.flag[2:]}"] if entry.is_switch else [])]
    return ", ".join(f"`{each}`" for each in names)


def _values(entry: Entry, marked: Any) -> str:
    if entry.mark.metavar or entry.unit is not None or entry.is_switch:
        return "" if entry.mark.is_positional else entry.value_name
    names = {int: "integer", float: "number", str: "text"}
    limits = "".join(f" {mark.wanted}" for mark in _marks(marked) if isinstance(mark, Rule) and mark.wanted)
    limits = limits.replace(f" and up to {LARGEST}", "").replace(f" to {LARGEST}", " on")
    plain = [names[each] + limits for each in entry.alternatives if get_origin(each) is None]
    return ", ".join([*(f"`{word}`" for word in entry.choices), *plain]) + (" ..." if entry.is_list else "")


def _marks(hint: Any) -> Iterator[Any]:
    """Of a type, and of the types inside it."""
    yield from getattr(hint, "__metadata__", ())
    for inner in get_args(getattr(hint, "__origin__", None) if hasattr(hint, "__metadata__") else hint):
        yield from _marks(inner)


def _default(entry: Entry) -> str:
    if entry.is_required:
        return "required"
    if entry.default in (None, (), ""):
        return ""
    return {True: "on", False: "off"}[entry.default] if isinstance(entry.default, bool) else f"`{entry.default}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

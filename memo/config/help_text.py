"""Help of a command: the texts of --help, --help GROUP and --help-all.

A command with few flags explains all of them under --help. A command with hundreds explains the flags that everyone
needs, shows commands that work, and lists all other flags by group.
"""

import dataclasses
import re
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from memo.config.flag_table import CommandLine, Entry, FlagGroup, texts_of

ALL = "all"
REQUESTS = ("-h", "--help", "--help-all", "--help_all")
"""Words that ask for help."""
_MOST_COLUMNS = 100
_TEXT_COLUMN = 6


def request(argv: Sequence[str]) -> str | None:
    """The help that `argv` asks for: "" for --help, ALL for --help-all, the name of a group; None for none."""
    for at, word in enumerate(argv):
        if word in REQUESTS[2:]:
            return ALL
        if word in REQUESTS:
            following = argv[at + 1] if at + 1 < len(argv) else ""
            return "" if following.startswith("-") else following
    return None


def render(line: CommandLine, wanted: str) -> str:
    """The text of `wanted`, as `request` returns it; a name that is no group's counts as --help alone."""
    group = next((each for each in line.groups if each.name == wanted and wanted), None)
    if group is not None:
        return "\n".join(_explained(group)).strip()
    explains_all = wanted == ALL or not line.first
    program = line.prog if line.prog.startswith("memo ") else f"python {line.prog}"
    parts = [f"usage: {program} {_positionals(line)}[--FLAG VALUE ...]", "", _wrapped(" ".join(line.about.split()))]
    if line.examples:
        parts += ["", "examples:", *(f"  {example}" for example in line.examples)]
    if explains_all:
        parts += [text for each in line.groups for text in _explained(each)]
    else:
        parts += list(_overview(line, program))
    return "\n".join(parts)


def first_sentence(line: CommandLine, entry: Entry) -> str:
    """The first sentence of a flag's help, in brackets, for the message that the flag is missing."""
    text = next(texts_of(each.kind).get(entry.field, "") for each in line.groups if entry in each.entries)
    sentence = re.split(r"(?<!\.)\.(?: |$)", text)[0]  # three dots end no sentence
    return f" ({sentence[:1].lower()}{sentence[1:]})" if text else ""


def _overview(line: CommandLine, program: str) -> Iterator[str]:
    """The flags of the command itself, those that everyone needs, and the names of all others by group."""
    own, groups = [each for each in line.groups if not each.name], [each for each in line.groups if each.name]
    for each in own:
        yield from _explained(each)
    yield "\nthe flags that everyone needs:"
    by_field = {entry.field: (each, entry) for each in groups for entry in each.entries}
    for name in line.first:
        group, entry = by_field[name]
        yield from _described(group, entry)
    yield ""
    yield _wrapped(
        f"all flags by group; `{program} --help GROUP` explains those of one, `{program} --help-all` all of them:"
    )
    for each in groups:
        names = ", ".join(entry.flag[2:] for entry in each.entries)
        yield _wrapped(f"{each.name}: {names}", indent=2, hanging=_TEXT_COLUMN)


def _explained(group: FlagGroup) -> Iterator[str]:
    yield f"\n{group.name or 'flags'}:"
    if group.name and group.kind.__doc__:
        yield _wrapped(" ".join(group.kind.__doc__.split()), indent=2)
    for entry in group.entries:
        yield from _described(group, entry)


def _described(group: FlagGroup, entry: Entry) -> Iterator[str]:
    names = entry.flags if entry.mark.is_positional or not entry.is_switch else (*entry.flags, f"--no-{entry.flag[2:]}")
    value = "" if entry.mark.is_positional else f" {entry.value_name}".rstrip() + (" ..." if entry.is_list else "")
    yield f"  {', '.join(names)}{value}"
    text = texts_of(group.kind).get(entry.field, "")
    default = _default((group.defaults or {}).get(entry.field, entry.default))
    yield _wrapped(f"{text} {default}".strip(), indent=_TEXT_COLUMN)


def _default(value: Any) -> str:
    if value is dataclasses.MISSING:
        return "(required)"
    if value in (None, (), ""):
        return ""
    if isinstance(value, bool):
        return f"(default: {'on' if value else 'off'})"
    return f"(default: {value})"


def _positionals(line: CommandLine) -> str:
    return "".join(f"{entry.flag} " for entry in line.entries if entry.mark.is_positional)


def _wrapped(text: str, indent: int = 0, hanging: int | None = None) -> str:
    columns = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
    left, below = " " * indent, " " * (indent if hanging is None else hanging)
    return textwrap.fill(
        text,
        max(columns, 40),
        initial_indent=left,
        subsequent_indent=below,
        break_on_hyphens=False,
        break_long_words=False,
    )

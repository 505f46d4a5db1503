"""Reads a command line: the flags of some dataclasses, their values, and one message about what is wrong.

    memo plan --model gpt-7b --gpus=8 --seq_len 512K --json

Flags are field names with dashes, underscores work too. A switch is `--packing` or `--no-packing`. If a flag is
given twice, the last value counts, so that appending to a command overrides it. Help is in memo.config.help_text.
"""

import difflib
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from memo.artifacts.reading import shown
from memo.config import help_text
from memo.config.check_fields import check_options
from memo.config.flag_table import CommandLine, Entry, FlagGroup, dashed
from memo.config.other_names import NAMES_ELSEWHERE, advice
from memo.errors import ConfigError

T = TypeVar("T")


def parse_options(
    kind: type[T],
    argv: Sequence[str],
    *,
    prog: str,
    about: str = "",
    examples: Sequence[str] = (),
) -> T:
    """Parse the flags of one command into its dataclass; `about` defaults to the dataclass's docstring.

    Raises ConfigError for a word that is no flag, for a value that a flag does not take, for a flag that nothing reads
    beside the others, and for a required flag that is missing; SystemExit after --help.
    """
    line = CommandLine(prog, about or kind.__doc__ or "", (FlagGroup(kind),), tuple(examples))
    wanted = help_text.request(argv)
    if wanted is not None:
        print(help_text.render(line, wanted))
        raise SystemExit(0)
    options = kind(**read_values(line, argv))
    check_options(options)
    return options


def read_values(line: CommandLine, argv: Sequence[str]) -> dict[str, Any]:
    """{field: value} of the flags in `argv`. Raises ConfigError, as `parse_options` does."""
    values: dict[str, Any] = {}
    alone: list[str] = []
    for given, entry, texts in _parts(line, argv):
        if entry is None:
            alone += texts
        elif entry.is_switch:
            values[entry.field] = not given.startswith("--no-")
        else:
            read = tuple(entry.read(text, given) for text in texts)
            if None in read and read != (None,):
                raise ConfigError(
                    f"{given} has None beside other values: give None alone, which unsets it, or leave it out"
                )
            values[entry.field] = read if entry.is_list and read != (None,) else read[0]
    values |= _positionals(line, alone)
    for entry in line.entries:
        if entry.is_required and entry.field not in values:
            text = help_text.first_sentence(line, entry)
            raise ConfigError(f"{line.prog}: {entry.flag} is not given: give it{text}")
    return values


def _parts(line: CommandLine, argv: Sequence[str]) -> Iterator[tuple[str, Entry | None, list[str]]]:
    """Each flag as it was given, with its texts; words that stand alone come without a flag."""
    by_flag = {flag: entry for entry in line.entries if not entry.mark.is_positional for flag in entry.flags}
    switches = {f"--no-{flag[2:]}": entry for flag, entry in by_flag.items() if entry.is_switch}
    words = list(argv)
    for word in words:
        if not word.isprintable() and any("\ud800" <= each <= "\udfff" for each in word):
            raise ConfigError(f"{shown(word)} is not text in UTF-8: rename the file, or write the text in UTF-8")
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            yield word, None, [word]
            continue
        name, has_value, text = word.partition("=")
        given = name.replace("_", "-")
        entry = by_flag.get(given) or switches.get(given)
        if entry is None:
            raise ConfigError(_unknown(line, given, text or next(iter(words), "")))
        if entry.is_switch:
            if has_value:
                on, off = entry.flag, f"--no-{entry.flag[2:]}"
                raise ConfigError(
                    f"{given} is given the value '{text}', but it is a switch: write {on} for on, {off} for off"
                )
            yield given, entry, []
            continue
        texts = [text] if has_value else []
        while words and not words[0].startswith("--") and (entry.is_list or not texts):
            texts.append(words.pop(0))
        if not texts:
            raise ConfigError(f"{given} is given without a value: give {entry.wanted}")
        yield given, entry, texts


def _positionals(line: CommandLine, words: list[str]) -> dict[str, Any]:
    entries = [entry for entry in line.entries if entry.mark.is_positional]
    values: dict[str, Any] = {}
    for entry in entries:
        taken, words = (words, []) if entry.is_list else (words[:1], words[1:])
        if taken:
            values[entry.field] = tuple(taken) if entry.is_list else entry.read(taken[0], entry.flag)
    if words:
        raise ConfigError(_stray(line, words[0]))
    return values


def _stray(line: CommandLine, word: str) -> str:
    if word.lower() in ("true", "false", "on", "off", "yes", "no"):
        return f"'{word}' belongs to no flag: a switch takes no value, so write --name to turn it on, --no-name for off"
    if word.startswith("-"):
        return f"'{word}' is no flag: flags have two dashes, such as -{word}; see `{line.prog} --help`"
    stem, _, ending = word.rpartition(".")
    if ending in ("yaml", "yml", "json", "toml") and any(entry.field == "config" for entry in line.entries):
        told = f"'{word}' belongs to no flag: give the fields of a run as --config {stem}.toml"
        return told if ending == "toml" else f"{told}, written as TOML by memo's names (docs/flags.md)"
    return f"'{word}' belongs to no flag: give flags as --name value, see `{line.prog} --help`"


def _unknown(line: CommandLine, given: str, value: str) -> str:
    """The message about a flag that the command does not have."""
    name = given[2:].replace("-", "_").lower()
    known = {each for entry in line.entries for each in (entry.field, *entry.mark.aliases)}
    found = line.notes.get(name) or NAMES_ELSEWHERE.get(line.prog, {}).get(name)
    found = found or advice(name, known, dashed, line.prog)
    if found:
        return f"there is no flag {given}: {found.replace('VALUE', value or 'VALUE')}"
    names = [flag[2:] for entry in line.entries if not entry.mark.is_positional for flag in entry.flags]
    names += [f"no-{entry.flag[2:]}" for entry in line.entries if entry.is_switch]
    near = difflib.get_close_matches(given[2:], names, n=1, cutoff=0.6)
    hint = f"did you mean --{near[0]}?" if near else f"see `{line.prog} --help`"
    return f"there is no flag {given}: {hint}"

"""Write docs/flags.md: every flag of every command, from the dataclasses that are the flags (`make docs`)."""

import ast
import dataclasses
import importlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import Positional

from memo.cli.commands import Command
from memo.cli.main import COMMANDS, main
from memo.config import RunConfig
from memo.config.flags import ALWAYS_ON, MEGATRON_SPELLINGS

PAGE = Path(__file__).with_name("flags.md")
INTRODUCTION = """# Flags

<!-- Written by docs/make_flags.py from the dataclasses that are the flags: change those, then run `make docs`. -->

`memo COMMAND --help` prints the same. Underscores work for dashes. Each flag of `memo train` is also a key of a
`--config` file, with underscores, at the top or under its section, and a keyword of `memo.Trainer`.
"""


class _Parsed(Exception):
    """What a command hands to tyro: the dataclass of its flags."""


def page() -> str:
    """The whole of docs/flags.md."""
    sections = [INTRODUCTION, "\n".join(_run_tables())]
    for words, summary in _commands(COMMANDS):
        if words != ("train",):
            sections.append("\n".join(_command(words, summary)))
    return "\n".join(sections).rstrip() + "\n"


def _run_tables() -> Iterator[str]:
    """`memo train`: the sections of a run, and what Megatron-LM says otherwise."""
    line = _plain(_captured(("train",)))
    yield "## memo train\n\nAlso of `examples/pretrain_gpt.py`.\n"
    yield from _table(get_type_hints(get_origin(line))["sources"])
    for name, kind in get_type_hints(RunConfig).items():
        yield f"\n### {name}\n\n{inspect.getdoc(kind)}\n"
        yield from _table(kind)
    same = ", ".join(f"`{flag}` for `{' '.join(ours)}`" for flag, ours in MEGATRON_SPELLINGS.items())
    always = ", ".join(f"`{flag}`" for flag in ALWAYS_ON)
    yield f"\nAlso {same}, as in Megatron-LM. Refused, because memo always does it: {always}.\n"


def _command(words: Sequence[str], summary: str) -> Iterator[str]:
    kind = _plain(_captured(words))
    yield f"## memo {' '.join(words)}\n\n{summary[0].upper()}{summary[1:]}."
    if get_args(kind):  # a run's command line with options of the command's own
        (kind,) = get_args(kind)
        yield "Takes every flag of `memo train`, and:"
    yield ""
    yield from _table(kind)
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


def _captured(words: Sequence[str]) -> type:
    """The dataclass that a command parses its flags into, caught on its way to tyro."""
    real: Callable[..., Any] = tyro.cli

    def catch(kind: Any, **options: Any) -> Any:
        if not options.get("add_help", True):  # the first of two passes, which only finds preset and file
            return real(kind, **options)
        raise _Parsed(kind)

    tyro.cli = catch  # type: ignore[assignment]
    try:
        main([*words])
    except _Parsed as caught:
        kind: type = caught.args[0]
        return kind
    finally:
        tyro.cli = real
    raise AssertionError(f"memo {' '.join(words)} parses no flags")


def _table(kind: Any) -> Iterator[str]:
    fields = dataclasses.fields(kind)
    if not fields:
        return
    yield "| flag | values | default | |"
    yield "| --- | --- | --- | --- |"
    hints, comments = get_type_hints(kind, include_extras=True), _comments(kind)
    for field in fields:
        marks = get_args(hints[field.name])[1:] if get_origin(hints[field.name]) is Annotated else ()
        plain = _plain(hints[field.name])
        text = next((mark.help for mark in marks if getattr(mark, "help", None)), None) or comments.get(field.name, "")
        cells = [_flag(field.name, plain, marks), _values(plain, marks), _default(field), text]
        yield "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def _flag(name: str, kind: Any, marks: Sequence[Any]) -> str:
    metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), name.upper())
    if any(mark in get_args(Positional[int])[1:] for mark in marks):
        return f"`{metavar}`"
    aliases = [alias for mark in marks for alias in getattr(mark, "aliases", None) or ()]
    flag = f"--{name.replace('_', '-')}"
    names = [flag, *aliases, *([f"--no-{flag[2:]}"] if kind is bool else [])]
    return ", ".join(f"`{each}`" for each in names)


def _values(kind: Any, marks: Sequence[Any]) -> str:
    metavar = next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
    if metavar is not None or kind is bool:
        return metavar or ""
    return ", ".join(_alternatives(kind))


def _alternatives(kind: Any) -> list[str]:
    if get_origin(kind) in (Union, types.UnionType):
        return [text for part in get_args(kind) if part is not type(None) for text in _alternatives(part)]
    if get_origin(kind) is Literal:
        return [f"`{value}`" for value in get_args(kind)]
    if get_origin(kind) is tuple:
        return [f"{text} ..." for text in _alternatives(get_args(kind)[0])]
    return [{"str": "text", "int": "integer", "float": "number"}.get(kind.__name__, kind.__name__)]


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return "required" if field.default_factory is dataclasses.MISSING else ""
    if field.default in (None, (), ""):
        return ""
    return {True: "on", False: "off"}[field.default] if isinstance(field.default, bool) else f"`{field.default}`"


def _plain(kind: Any) -> Any:
    return get_args(kind)[0] if get_origin(kind) is Annotated else kind


def _comments(kind: type) -> dict[str, str]:
    """{field: the string below it}, base classes included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(body, ast.ClassDef)
        for statement, below in zip(body.body, body.body[1:], strict=False):
            if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
                assert isinstance(statement.target, ast.Name) and isinstance(below.value, ast.Constant)
                found[statement.target.id] = str(below.value.value)
    return found


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

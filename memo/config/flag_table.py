"""The flags of a dataclass: their names, what they accept, and the help below each field.

A command takes the flags of one dataclass or of several, in groups.
"""

import ast
import dataclasses
import inspect
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from memo.artifacts.fields import accepted, field_types
from memo.artifacts.reading import shown
from memo.config.flag import Flag, NumberUnit, ReadWith, reading_marks
from memo.config.require import either
from memo.errors import ConfigError
from memo.units import K_OTHERS, K_TOKENS, parse_count


@dataclass(frozen=True)
class Entry:
    """One flag.

    Attributes:
        field: the name of its dataclass field.
        hint: the type of its value, or of each of its values, without marks.
        is_list: it takes several values.
        is_optional: it takes None.
    """

    field: str
    hint: Any
    mark: Flag
    unit: NumberUnit | None
    default: Any
    is_list: bool
    is_optional: bool

    @property
    def flag(self) -> str:
        """`--seq-length`; for a value that stands alone its name in help."""
        return self.value_name if self.mark.is_positional else dashed(self.field)

    @property
    def flags(self) -> tuple[str, ...]:
        """All its names, without those that turn it off."""
        return (self.flag, *(dashed(alias) for alias in self.mark.aliases))

    @property
    def is_switch(self) -> bool:
        """Whether `--name` turns it on and `--no-name` off."""
        return self.hint is bool

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def alternatives(self) -> tuple[Any, ...]:
        """The types that the value may have."""
        is_union = get_origin(self.hint) in (Union, types.UnionType)
        return tuple(each for each in get_args(self.hint) if each is not type(None)) if is_union else (self.hint,)

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it takes; there may be numbers besides."""
        return tuple(word for each in self.alternatives if get_origin(each) is Literal for word in get_args(each))

    @property
    def value_name(self) -> str:
        """The name of the value in help."""
        if self.mark.metavar or self.unit is not None or self.is_switch:
            return self.mark.metavar or (self.unit.metavar if self.unit else "")
        names = {int: "INT", float: "NUMBER", str: "TEXT"}
        plain = [names[each] for each in self.alternatives if each in names]
        return "|".join([*self.choices, *plain])

    @property
    def wanted(self) -> str:
        """What it accepts, for messages."""
        if self.unit is not None:
            return self.unit.wanted
        if self.choices:
            others = [each for each in self.alternatives if get_origin(each) is not Literal]
            words = f"one of {', '.join(self.choices)}"
            return " or ".join([words, *(accepted(each) for each in others)])
        return accepted(self.hint)

    def read(self, text: str, given: str) -> Any:
        """The value that `text` stands for; `given` is the flag as it was written. Raises ConfigError."""
        if text == "None" and self.is_optional:
            return None
        if not text:  # mostly a variable of the shell that is not set
            raise ConfigError(f"{given} is given an empty value: give {self.wanted}, or leave it out")
        for kind in self.alternatives:
            if get_origin(kind) is Literal and text in get_args(kind):
                return text
            try:
                if kind is int:
                    return _of_64_bits(int(text) if self.unit is None else self.unit.parse(text))
                if kind is float:
                    return float(text)
            except ValueError:
                continue
            if kind is str:
                return text
        if int in self.alternatives and re.fullmatch(r"\d+[KkMm]", text):
            sizes = f"{parse_count(text, K_OTHERS)} or {parse_count(text, K_TOKENS)}"
            raise ConfigError(f"{given} is {shown(text)}, which may be {sizes}: write the number that is meant")
        raise ConfigError(f"{given} is {shown(text)}: give {self.wanted}{self._example}")

    @property
    def _example(self) -> str:
        if self.unit is not None or self.choices or not {int, float} & set(self.alternatives):
            return ""
        if self.default in (None, dataclasses.MISSING):
            return ", such as 8" if int in self.alternatives else ""
        return f", such as the default {self.default}"


def _of_64_bits(value: int) -> int:
    """`value`. Raises ValueError for a number that does not fit in the 64 bits of memo's files and of torch."""
    if not -(1 << 63) <= value < 1 << 63:
        raise ValueError(value)
    return value


@dataclass(frozen=True)
class FlagGroup:
    """Flags that stand together in help.

    Attributes:
        kind: the dataclass whose fields they are.
        name: its heading; empty for the flags of the command itself.
        defaults: {field: value where no flag is given}; None: the defaults of the dataclass.
    """

    kind: type
    name: str = ""
    defaults: Mapping[str, Any] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return entries_of(self.kind)


@dataclass(frozen=True)
class CommandLine:
    """The flags of a command, and its texts for help.

    Attributes:
        prog: as people type it, such as `memo plan`.
        about: what it does, for help.
        groups: its flags.
        examples: whole command lines that work, for help.
        first: fields of the flags that --help explains, where it does not explain all.
        notes: {name: what to do instead} of flags that people expect here and that it does not have.
    """

    prog: str
    about: str
    groups: tuple[FlagGroup, ...]
    examples: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        return [entry for group in self.groups for entry in group.entries]


def dashed(name: str) -> str:
    """`seq_length` -> `--seq-length`."""
    return f"--{name.replace('_', '-')}"


def changed(section: Any) -> dict[str, Any]:
    """{field: value} of the fields of a dataclass that do not have their default, in its order."""
    values = {field.name: (getattr(section, field.name), field.default) for field in dataclasses.fields(section)}
    return {name: value for name, (value, default) in values.items() if value != default}


@cache
def entries_of(kind: type) -> tuple[Entry, ...]:
    """The flags of a dataclass, in its order."""
    hints = get_type_hints(kind)
    return tuple(_entry(field, hints[field.name], field_types(kind)[field.name]) for field in dataclasses.fields(kind))


def _entry(field: "dataclasses.Field[Any]", hint: Any, marked: Any) -> Entry:
    marks = get_args(marked)[1:] if get_origin(marked) is Annotated else ()
    is_optional = type(None) in get_args(hint)
    if is_optional:
        hint = Union[tuple(each for each in get_args(hint) if each is not type(None))]  # noqa: UP007 - made at run time
    is_list = get_origin(hint) is tuple
    default = field.default
    if default is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
        default = field.default_factory()
    return Entry(
        field.name,
        get_args(hint)[0] if is_list else hint,
        next((mark for mark in marks if isinstance(mark, Flag)), Flag()),
        next((mark for mark in marks if isinstance(mark, NumberUnit)), None),
        default,
        is_list,
        is_optional,
    )


@cache
def texts_of(kind: type) -> dict[str, str]:
    """{field: help}: the mark's help, else the text below the field, base classes included; then the flags with which
    the field is read.

    The text below a field is read from the source file, and is empty where there is none.
    """
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        found.update(_texts_below(base))
    found |= {entry.field: entry.mark.help for entry in entries_of(kind) if entry.mark.help}
    for name, marks in reading_marks(kind).items():
        if marks:
            found[name] = f"{found.get(name, '')} Read with {' and '.join(map(_condition, marks))}."
    return found


def _condition(mark: ReadWith) -> str:
    """`--rope-scaling-type llama3 or yarn`; `--lora-rank`."""
    values = f"other than {either(mark.but)}" if mark.but else either(mark.values)
    return f"{dashed(mark.field)} {values}".strip()


def _texts_below(kind: type) -> Iterator[tuple[str, str]]:
    try:
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    except (OSError, TypeError):  # a class that no file holds
        return
    assert isinstance(body, ast.ClassDef)
    for statement, below in zip(body.body, body.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(below, ast.Expr):
            assert isinstance(statement.target, ast.Name) and isinstance(below.value, ast.Constant)
            yield statement.target.id, " ".join(str(below.value.value).split())

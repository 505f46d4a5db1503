"""What a command takes: its flags in groups, and what help says of it."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from memo.config.flag_table import Entry, entries_of


@dataclass(frozen=True)
class Group:
    """Flags that stand together in help.

    Attributes:
        kind: the dataclass whose fields they are.
        name: its heading; empty for the flags of the command itself.
        defaults: the values that count where no flag is given, by field; None for those of the dataclass.
    """

    kind: type
    name: str = ""
    defaults: Mapping[str, Any] | None = None

    @property
    def entries(self) -> tuple[Entry, ...]:
        return entries_of(self.kind)


@dataclass(frozen=True)
class CommandLine:
    """What a command takes.

    Attributes:
        prog: as people type it, such as `memo plan`.
        about: what it does, for help.
        groups: its flags.
        examples: whole command lines that work, for help.
        first: fields of the flags that --help explains, where it does not explain all.
        notes: {name: what to do instead}, of flags that people look for here and that it does not have.
    """

    prog: str
    about: str
    groups: tuple[Group, ...]
    examples: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def entries(self) -> list[Entry]:
        return [entry for group in self.groups for entry in group.entries]


def values_of(section: Any) -> dict[str, Any]:
    """{field: value} of a dataclass, for Group.defaults."""
    return {each.name: getattr(section, each.name) for each in dataclasses.fields(section)}

"""Rules that fields state in their types: the values that they take, and the fields with which they are read.

    num_layers: Annotated[int, in_range(1, 1 << 16)]                  --num-layers is 0: give a whole number ...
    rope_truncate: Annotated[bool, ReadWith("rope_scaling_type", ...)] --no-rope-truncate has no use where ...

Rules about several fields are templates, in which `{num_layers}` stands for the flag and its value: --num-layers 4.
"""

from collections.abc import Callable, Iterable
from dataclasses import fields
from typing import Any

from memo.artifacts.fields import checked, field_types
from memo.artifacts.reading import Source
from memo.config.flag import ReadWith, reading_marks
from memo.config.flag_table import dashed
from memo.config.other_names import filled
from memo.config.require import either, require
from memo.config.run import RunConfig, section_of
from memo.errors import ConfigError

Conflict = tuple[str, tuple[str, ...], str]
"""A field, others that cannot be given beside it, and why."""
Condition = tuple[Callable[[RunConfig], object], str]
"""A condition that must hold, and the message if it does not."""


def check_fields(config: RunConfig, *sections: str) -> None:
    """Raises ConfigError for a value that its field does not take, then for a value that nothing reads, in these
    sections; by default in all."""
    named = sections or [section.name for section in fields(config)]
    check_values(config, *named)
    for section in named:
        _check_reading(config, getattr(config, section))


def check_options(options: Any) -> None:
    """`check_fields` for the flags that a command has besides those of a run, in one dataclass."""
    _check_types(options)
    _check_reading(options, options)


def check_values(config: RunConfig, *sections: str) -> None:
    """Raises ConfigError for a value that the type of its field does not accept."""
    for section in sections or [section.name for section in fields(config)]:
        _check_types(getattr(config, section))


def _check_types(values: Any) -> None:
    kind: type = type(values)
    types = field_types(kind)
    for entry in fields(values):
        value = getattr(values, entry.name)
        if isinstance(value, int | float | str):
            remedy = "leave it out" if entry.default in (None, "") else f"the default {entry.default}"
            checked(types[entry.name], value, dashed(entry.name), Source("", ConfigError, remedy))


def _check_reading(config: Any, values: Any) -> None:
    """Check the ReadWith marks of `values`, which name fields of `config`."""
    kind: type = type(values)
    for name, marks in reading_marks(kind).items():
        written = given(config, name) if marks else ""
        for mark in marks if written else ():
            other = _value(config, mark.field)
            require(
                mark.accepts(other),
                f"{written} has no use where {_told(mark.field, other)}: give {_use(mark)}, or leave it out",
            )


def check_conflicts(config: Any, conflicts: Iterable[Conflict]) -> None:
    """Raises ConfigError where two fields, of a run or of the options of a command, cannot be together."""
    for name, others, why in conflicts:
        for other in others if given(config, name) else ():
            require(
                not given(config, other),
                f"{given(config, name)} conflicts with {given(config, other)}: {why}; leave one of the two out",
            )


def check_conditions(config: RunConfig, conditions: Iterable[Condition]) -> None:
    """Raises ConfigError for the first condition that does not hold."""
    for holds, message in conditions:
        if not holds(config):
            raise ConfigError(filled(message, lambda name: written(name, _value(config, name))))


def given(config: Any, name: str) -> str:
    """The flag and its value as they were given, in a run or in the options of a command; empty for a field that has
    its default, or an empty value where the default is None."""
    value, default = _value(config, name), getattr(type(_owner(config, name)), name)
    return "" if value == default or (default is None and not value) else written(name, value)


def written(name: str, value: object) -> str:
    """A flag and its value on the command line; a switch is on or off."""
    if isinstance(value, bool):
        return dashed(name) if value else f"--no-{dashed(name)[2:]}"
    return f"{dashed(name)} {' '.join(value) if isinstance(value, tuple) else value}"


def _told(name: str, value: object) -> str:
    state = "not given" if value in (None, "", ()) and not isinstance(value, bool) else value
    return f"{dashed(name)} is {'off' if value is False else state}"


def _use(mark: ReadWith) -> str:
    return mark.use or f"{dashed(mark.field)} {either(mark.values)}".strip()


def _value(config: Any, name: str) -> Any:
    return getattr(_owner(config, name), name)


def _owner(config: Any, name: str) -> Any:
    """The dataclass with a field: a section of a run, or the options of a command themselves."""
    return getattr(config, section_of(name, "")) if isinstance(config, RunConfig) else config

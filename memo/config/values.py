"""Types of configuration values that come from TOML or Python, where no parser has seen them."""

from functools import cache
from typing import Any, get_type_hints

from memo.artifacts.fields import checked
from memo.artifacts.reading import Source
from memo.config.flag_table import entries_of
from memo.errors import ConfigError


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def _words(value: object) -> object:
    """What a list of texts may be written as: one text without brackets, and numbers without quotes."""
    if not isinstance(value, list | tuple):
        return (value,)
    return tuple(repr(each) if type(each) in (int, float) else each for each in value)


def checked_value(section: type, name: str, value: object, source: str) -> object:
    """`value` for a field of a section's dataclass; an int becomes a float where a float is due, "512K" a number.

    Raises ConfigError that names the source, the field, the value and what would be accepted.
    """
    entry = next(entry for entry in entries_of(section) if entry.field == name)
    if isinstance(value, str) and entry.unit is not None:
        return entry.read(value, f"{source}: {name}")
    if entry.is_list and value is not None:
        value = _words(value) if entry.hint is str else value
    return checked(_hints(section)[name], value, name, Source(source, ConfigError, ""))

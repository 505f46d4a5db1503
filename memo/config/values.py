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


def checked_value(section: type, name: str, value: object, source: str) -> object:
    """`value` for a field of a section's dataclass; an int becomes a float where a float is due, "512K" a number.

    Raises ConfigError that names the source, the field, the value and what would be accepted.
    """
    entry = next(entry for entry in entries_of(section) if entry.field == name)
    if isinstance(value, str) and entry.unit is not None:
        return entry.read(value, f"{source}: {name}")
    return checked(_hints(section)[name], value, name, Source(source, ConfigError, ""))

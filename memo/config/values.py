"""Types of configuration values that come from TOML or Python, where no parser has seen them."""

from functools import cache
from typing import Any, get_type_hints

from memo.artifacts.fields import checked
from memo.artifacts.reading import Source
from memo.errors import ConfigError


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)


def checked_value(section: type, name: str, value: object, source: str) -> object:
    """`value` for a field of a section's dataclass; an int becomes a float where a float is due.

    Raises ConfigError that names the source, the field, the value and what would be accepted.
    """
    return checked(_hints(section)[name], value, name, Source(source, ConfigError, ""))

"""Types of configuration values that come from TOML or Python, where no parser has seen them."""

import types
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from memo.errors import ConfigError


@cache
def _hints(section: type) -> dict[str, Any]:
    return get_type_hints(section, include_extras=False)


def checked_value(section: type, name: str, value: object, source: str) -> object:
    """`value` for a field of a section's dataclass; an int becomes a float where a float is due.

    Raises ConfigError that names the source, the field, the value and what would be accepted.
    """
    hint = _hints(section)[name]
    choices = _alternatives(hint)
    for choice in choices:
        if get_origin(choice) is Literal:
            if value in get_args(choice):
                return value
        elif choice is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        elif type(value) is choice:
            return value
    wanted = " or ".join(_describe(choice) for choice in choices if choice is not type(None))
    raise ConfigError(f"{source}: {name} is {value!r} ({type(value).__name__}): give {wanted}")


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if get_origin(hint) is Annotated:
        hint = get_args(hint)[0]
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _describe(choice: Any) -> str:
    if get_origin(choice) is Literal:
        return "one of " + ", ".join(f'"{value}"' for value in get_args(choice))
    return {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}[choice]

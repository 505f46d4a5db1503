"""Refuses settings that nothing reads: whoever gives one has probably forgotten another."""

import dataclasses
from typing import Any

from memo.config.flag_table import dashed
from memo.config.require import require


def require_read(section: Any, name: str, is_read: object, ignored_by: str, use: str) -> None:
    """Raises ConfigError for a field that differs from its default, unless it is read."""
    written = given(section, name)
    require(is_read or not written, f"{written} fights with {ignored_by}, which ignores it: use {use}, or leave it out")


def require_with(section: Any, name: str, needed: object, flag: str, example: str) -> None:
    """Raises ConfigError for a field that differs from its default where `needed`, the value of `flag`, is missing."""
    written = given(section, name)
    require(
        needed or not written, f"{written} needs {flag}, which is not given: give {flag} {example}, or leave it out"
    )


def given(section: Any, name: str) -> str:
    """The flag as it was given; empty for a field that has its default."""
    value = getattr(section, name)
    default = next(field.default for field in dataclasses.fields(section) if field.name == name)
    if value == default:
        return ""
    if isinstance(value, bool):
        return dashed(name) if value else f"--no-{dashed(name)[2:]}"
    return f"{dashed(name)} {value}"

"""Checks values from JSON and TOML files against the types of a dataclass's fields.

    @dataclass(frozen=True)
    class Row:
        name: str
        tokens: Count                          Annotated[int, in_range(0)]
        seconds: dict[str, PositiveFloat]      Annotated[float, in_range(above=0)]
        note: str | None = None

    build(Row, {"name": "a", "tokens": "no"}, source)
        DataError: rows.json: tokens is 'no' (a text): give a whole number, or ...

Whole numbers must fit into 64 bits and floats must be finite, unless the field says otherwise. true and false are not
numbers, and numbers are not booleans. A whole number becomes a float if the field is a float.
"""

import dataclasses
import math
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import count, repeat
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from memo.artifacts.reading import Source, kind_of, shown

T = TypeVar("T")
Check = Callable[[Any], Any]
"""Returns a value as the field stores it; raises FieldMismatch."""


@dataclass(frozen=True)
class Rule:
    """A condition on the value of an Annotated field besides its type.

    Attributes:
        wanted: words after the type in messages, such as 'of 0 or more'.
        accepts: whether a value of the type meets the condition.
    """

    wanted: str
    accepts: Callable[[Any], bool]


@dataclass(frozen=True)
class Written:
    """Marks an Annotated field that has type `hint` in a file; its dataclass converts the value itself."""

    hint: Any


def in_range(low: float = -math.inf, high: float = math.inf, above: float = -math.inf) -> Rule:
    """A number from `low` to `high`, or above `above` and up to `high`."""
    if above > -math.inf:
        wanted = f"above {above}" + ("" if high == math.inf else f" and up to {high}")
        return Rule(wanted, lambda value: above < value <= high)
    wanted = f"of {low} or more" if high == math.inf else f"from {low} to {high}"
    return Rule(wanted, lambda value: low <= value <= high)


def _is_time(value: str) -> bool:
    try:
        datetime.fromisoformat(value)
    except ValueError:
        return False
    return True


def is_file_name(value: str) -> bool:
    """Whether file systems accept `value` as the name of a file; false for a path."""
    # Half of a surrogate pair, which JSON can contain, is not printable; Linux accepts at most 255 bytes.
    num_bytes = len(value.encode("utf-8", errors="ignore"))
    is_name = Path(value).name == value not in ("", "..") and "\0" not in value
    return is_name and value.isprintable() and num_bytes <= 255


_NOT_FINITE = Rule("", lambda value: True)

Count = Annotated[int, in_range(0)]
PositiveInt = Annotated[int, in_range(1)]
PositiveFloat = Annotated[float, in_range(above=0)]
NonNegativeFloat = Annotated[float, in_range(0)]
AnyFloat = Annotated[float, _NOT_FINITE]
"""A float that may also be NaN or infinite, such as the loss of a skipped step."""
Time = Annotated[str, Rule("with a date and time, such as 2026-01-31T12:00:00+01:00", _is_time)]
"""A date and time in the format of ISO 8601."""
FileName = Annotated[str, Rule("that names a file beside it", is_file_name)]
"""The name of a file in the same folder."""


class FieldMismatch(Exception):
    """A value of a wrong type or out of range; `path` leads to it, the innermost step first: ['[3]', '.rows']."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem, self.remedy = problem, remedy
        self.path: list[str] = []


def build(kind: type[T], found: object, source: Source, *, ignore_unknown: bool = False) -> T:
    """Make a dataclass from `found`, an object whose keys are its fields; fields with a default may be missing.

    Args:
        ignore_unknown: whether to ignore other keys, for files of newer versions.

    Raises source.error, which names the field, its value, and the accepted values.
    """
    return _located(lambda value: _build(kind, value, ignore_unknown), found, "", source)


def checked(hint: Any, value: object, name: str, source: Source) -> Any:
    """Return `value` as a field of type `hint` stores it. Raises the errors of `build`.

    Args:
        hint: int, float, bool, str, None, Any, Literal, Annotated with a Rule, a dataclass, a NamedTuple (written
            as a list), and list, tuple, dict and unions of these.
    """
    return _located(_check_of(hint), value, name, source)


@cache
def field_types(kind: type) -> dict[str, Any]:
    """The types of a dataclass's fields, with their rules, for `checked`."""
    return get_type_hints(kind, include_extras=True)


def accepted(hint: Any) -> str:
    """The values that a field of this type accepts, in words such as 'a whole number'."""
    return " or ".join(_describe(choice) for choice in _choices(hint) if choice is not type(None))


def _located(check: Check, value: object, name: str, source: Source) -> Any:
    try:
        return check(value)
    except FieldMismatch as error:
        path = "".join([name, *reversed(error.path)]).removeprefix(".")
        problem = f"{path} {error.problem}" if path else error.problem
        remedy = f"{error.remedy}, or {source.remedy}" if error.remedy and source.remedy else error.remedy
        raise source.refusal(problem, remedy) from None


def _build(kind: type, found: object, ignore_unknown: bool) -> Any:
    if not isinstance(found, dict):
        raise FieldMismatch(f"holds {kind_of(found)}, not an object", "")
    checks, required = _checks(kind)
    unknown = next((key for key in found if key not in checks), None)
    if unknown is not None and not ignore_unknown:
        raise FieldMismatch(f"has a field {shown(unknown)}, which is not known", "")
    missing = next((name for name in required if name not in found), None)
    if missing is not None:
        raise FieldMismatch(f"has no field {missing}", "")
    given = [name for name in found if name in checks]
    parts = _parts(given, (checks[name] for name in given), (found[name] for name in given), step=".{}")
    return kind(**dict(zip(given, parts, strict=True)))


@cache
def _checks(kind: type) -> tuple[dict[str, Check], list[str]]:
    """The check of each field of a dataclass, and the names of required fields."""
    fields, none = dataclasses.fields(kind), dataclasses.MISSING
    required = [field.name for field in fields if field.default is none and field.default_factory is none]
    return {field.name: _check_of(field_types(kind)[field.name]) for field in fields}, required


def _parts(keys: Iterable[Any], checks: Iterable[Check], values: Iterable[Any], step: str = "[{}]") -> list[Any]:
    """Check the parts of a value; `step` is the format of a key in the path of a message."""
    kept = []
    for key, check, value in zip(keys, checks, values, strict=False):
        try:
            kept.append(check(value))
        except FieldMismatch as error:
            error.path.append(step.format(key if step.startswith(".") else shown(key)))
            raise
    return kept


@cache
def _check_of(hint: Any) -> Check:
    origin, args = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return lambda value: value
    if origin is Annotated:
        written = next((extra.hint for extra in args[1:] if isinstance(extra, Written)), None)
        return _annotated(hint, args[0], args[1:]) if written is None else _check_of(written)
    if origin in (Union, types.UnionType):
        return _union(hint, args)
    if origin is Literal:
        choices = {(type(choice), choice) for choice in args}
        return _plain(hint, lambda value: value.__hash__ is not None and (type(value), value) in choices)
    if origin is dict:
        each = _check_of(args[1])
        return _container(
            hint, dict, lambda found: zip(found, _parts(found, repeat(each), found.values()), strict=True)
        )
    if origin is list or (origin is tuple and args[-1] is Ellipsis):
        each = _check_of(args[0])
        return _container(hint, origin, lambda found: _parts(count(), repeat(each), found))
    if origin is tuple:
        checks = [_check_of(arg) for arg in args]
        return _container(hint, tuple, lambda found: _parts(count(), checks, found), len(checks))
    if isinstance(hint, type) and hasattr(hint, "_fields"):  # a NamedTuple
        check = _check_of(tuple.__class_getitem__(tuple(get_type_hints(hint, include_extras=True).values())))
        return lambda value: hint(*check(value))
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return lambda value: _build(hint, value, False)
    return {float: _number(math.isfinite), int: _whole}.get(hint) or _plain(hint, lambda value: type(value) is hint)


def _whole(value: object) -> int:
    if type(value) is not int or not -(1 << 63) <= value < 1 << 63:
        _refuse(int, value)
    return value


def _number(fits: Callable[[float], bool]) -> Check:
    def check(value: object) -> float:
        if type(value) is float and fits(value):
            return value
        return float(_whole(value)) if type(value) is int else _refuse(float, value)

    return check


def _plain(hint: Any, fits: Callable[[Any], bool]) -> Check:
    return lambda value: value if fits(value) else _refuse(hint, value)


def _container(hint: Any, kind: type, parts: Callable[[Any], Iterable[Any]], length: int | None = None) -> Check:
    """The check of a list or an object and all its parts; `length`: the required length, if there is one."""
    written = dict if kind is dict else (list, tuple)

    def check(value: Any) -> Any:
        if not isinstance(value, written) or length not in (None, len(value)):
            _refuse(hint, value)
        return kind(parts(value))

    return check


def _annotated(hint: Any, inner: Any, extras: tuple[Any, ...]) -> Check:
    rules = [extra for extra in extras if isinstance(extra, Rule)]
    wanted = f"give {accepted(hint)}"
    base = _number(lambda _: True) if _NOT_FINITE in rules else _check_of(inner)

    def check(value: object) -> Any:
        try:
            kept = base(value)
        except FieldMismatch as error:
            error.remedy = wanted
            raise
        if kept is not None and not all(rule.accepts(kept) for rule in rules):
            raise FieldMismatch(f"is {shown(value)}", wanted)
        return kept

    return check


def _union(hint: Any, args: tuple[Any, ...]) -> Check:
    others = [_check_of(arg) for arg in args if arg is not type(None)]

    def check(value: object) -> Any:
        if value is None and len(others) < len(args):
            return None
        if len(others) == 1:
            return others[0](value)
        for each in others:
            try:
                return each(value)
            except FieldMismatch:
                continue
        return _refuse(hint, value)

    return check


def _refuse(hint: Any, value: object) -> NoReturn:
    beyond = {int: " of more than 64 bits", float: " that is not finite"}.get(hint, "") if type(value) is hint else ""
    kind = "" if isinstance(value, list | tuple | dict) and value else f" ({kind_of(value)}{beyond})"
    raise FieldMismatch(f"is {shown(value)}{kind}", f"give {accepted(hint)}")


def _choices(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _describe(choice: Any) -> str:
    origin, args = get_origin(choice), get_args(choice)
    if origin is Annotated:
        return " ".join([accepted(args[0]), *(extra.wanted for extra in args[1:] if isinstance(extra, Rule))]).strip()
    if origin is Literal:
        return "one of " + ", ".join(f'"{value}"' for value in args)
    if origin in (tuple, list):
        return "a list" if origin is list or args[-1] is Ellipsis else f"a list of {len(args)}"
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}
    return names.get(choice, "an object")

"""Helpers of the checks: raise with one message, and name values that would work."""

from collections.abc import Sequence
from math import gcd, isqrt

from memo.config.flag import LARGEST
from memo.errors import ConfigError


def require(condition: object, message: str) -> None:
    """Raises ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_divides(flag: str, value: int, by: str, divisor: int, use: str) -> None:
    """Raises ConfigError unless the divisor, which `by` spells out, divides the value of the flag."""
    require(value % divisor == 0, f"{flag} {value} does not divide by {by}: use {use}")


def require_most(flag: str, value: float, limit: str, most: float) -> None:
    """Raises ConfigError for a value above the largest one, which `limit` spells out."""
    require(value <= most, f"{flag} {value} is above {limit}: give {most} or less")


def require_count(flag: str, value: int) -> None:
    """Raises ConfigError unless the value is a whole number from 1 on."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    require(is_count and 1 <= value <= LARGEST, f"{flag} is {value}: give a whole number above 0, such as 8")


def require_gib(flag: str, size: float) -> None:
    """Raises ConfigError unless the size is above 0 and at most LARGEST."""
    require(0 < size <= LARGEST, f"{flag} is {size}: give GiB above 0, such as 80")


def divisors_of(number: int) -> list[int]:
    """The divisors of a number, ascending."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return sorted({*low, *(number // d for d in low)})


def divisors(*numbers: int) -> str:
    """The common divisors as text: `divisors(12, 8)` -> '1, 2 or 4'; if there are more than six, the six largest."""
    found = divisors_of(gcd(*numbers))
    return either(found) if len(found) <= 6 else f"a divisor such as {either(found[-6:])}"


def neighbours(value: int, step: int) -> str:
    """The multiples of step around value as text: `neighbours(1000, 128)` -> '896 or 1024'."""
    below = value // step * step
    return either([multiple for multiple in (below, below + step) if multiple > 0])


def either(values: Sequence[object]) -> str:
    """`[1, 2, 4]` -> '1, 2 or 4'."""
    *others, last = [str(value) for value in values] or [""]
    return f"{', '.join(others)} or {last}" if others else last

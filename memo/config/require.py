"""Helpers of the checks: raise with one message, and name values that would work."""

from math import gcd, isqrt

from memo.config.flag import LARGEST
from memo.errors import ConfigError


def require(condition: object, message: str) -> None:
    """Raises ConfigError(message) unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def require_count(flag: str, value: int) -> None:
    """Raises ConfigError for what is no whole number from 1 on."""
    is_count = isinstance(value, int) and not isinstance(value, bool)
    require(is_count and 1 <= value <= LARGEST, f"{flag} is {value}: give a whole number above 0, such as 8")


def require_gib(flag: str, size: float) -> None:
    """Raises ConfigError for what is no size."""
    require(0 < size <= LARGEST, f"{flag} is {size}: give GiB above 0, such as 80")


def divisors(*numbers: int) -> str:
    """The common divisors for people: `divisors(12, 8)` -> '1, 2 or 4'."""
    greatest = gcd(*numbers)
    low = [d for d in range(1, isqrt(greatest) + 1) if greatest % d == 0]
    return either(sorted({*low, *(greatest // d for d in low)}))


def neighbours(value: int, step: int) -> str:
    """The multiples of step around value: `neighbours(1000, 128)` -> '896 or 1024'."""
    below = value // step * step
    return either([m for m in (below, below + step) if m > 0])


def either(values: list[int]) -> str:
    """`[1, 2, 4]` -> '1, 2 or 4'; a long list shows its six largest."""
    shown = [str(value) for value in values[-6:]]
    text = shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} or {shown[-1]}"
    return text if len(values) <= 6 else f"a divisor such as {text}"

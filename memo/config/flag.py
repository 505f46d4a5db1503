"""Marks of fields: what the name and the type of a dataclass field do not say of its flag.

    seq_length: Annotated[int, TOKENS, Flag(aliases=("seq_len",))] = 1024

is `--seq-length` and `--seq-len`, and takes `128K`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from memo.artifacts.fields import in_range
from memo.units import K_OTHERS, K_TOKENS, parse_bytes, parse_count

LARGEST = 1 << 40
"""The largest count that is accepted: a larger one in a table has usually lost its separator."""
PositiveInt = Annotated[int, in_range(1, LARGEST)]
NonNegativeInt = Annotated[int, in_range(0, LARGEST)]
Share = Annotated[float, in_range(0, 1)]


@dataclass(frozen=True)
class Flag:
    """How a field is written on the command line.

    Attributes:
        aliases: further names of the field, also in TOML files and Python.
        metavar: stands for the value in help.
        help: what the flag does, where it is not the text below the field.
        is_positional: the value stands alone, without a flag.
    """

    aliases: tuple[str, ...] = ()
    metavar: str = ""
    help: str = ""
    is_positional: bool = False


@dataclass(frozen=True)
class NumberUnit:
    """A whole number that may be written shorter.

    Attributes:
        metavar: stands for the value in help.
        wanted: what is accepted, for messages.
        parse: from text; raises ValueError.
    """

    metavar: str
    wanted: str
    parse: Callable[[str], int]


TOKENS = NumberUnit(
    "TOKENS", "a whole number of tokens, such as 131072 or 128K (1K is 1,024)", partial(parse_count, k=K_TOKENS)
)
COUNT = NumberUnit("COUNT", "a whole number, such as 2000 or 2K (1K is 1,000)", partial(parse_count, k=K_OTHERS))
BYTES = NumberUnit("BYTES", "a whole number of bytes, such as 65536 or 64KiB", parse_bytes)

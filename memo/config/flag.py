"""Marks of dataclass fields: facts about a flag that the name and the type of its field do not say.

    seq_length: Annotated[int, TOKENS, Flag(aliases=("seq_len",))] = 1024

is `--seq-length` and `--seq-len`, and takes `128K`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated

from memo.artifacts.fields import Rule, field_types, in_range
from memo.units import K_OTHERS, K_TOKENS, parse_bytes, parse_count

LARGEST = 1 << 40
"""The largest count that is accepted: a larger one in a table has usually lost its separator."""
PositiveInt = Annotated[int, in_range(1, LARGEST)]
NonNegativeInt = Annotated[int, in_range(0, LARGEST)]
SizeGib = Annotated[float, in_range(above=0, high=LARGEST)]
Share = Annotated[float, in_range(0, 1)]
PathText = Annotated[str, Rule("that is not empty", bool)]


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
class ReadWith:
    """The field is read only where another field has certain values; elsewhere it is refused as a probable mistake.

    Attributes:
        field: the name of the other field.
        values: values of the other field with which this one is read; one of the words, if it is a text with commas.
            Empty: any value but None, 0, an empty text and False.
        but: values with which this field is not read, in the place of `values`.
        use: the flags that a message tells to give; by default the other field with `values`.
    """

    field: str
    values: tuple[str, ...] = ()
    but: tuple[str, ...] = ()
    use: str = ""

    def accepts(self, value: object) -> bool:
        """Whether the field is read with this value of the other field."""
        words = value.split(",") if isinstance(value, str) else [value]
        if self.but:
            return not any(word in self.but for word in words)
        return any(word in self.values for word in words) if self.values else bool(value)


@cache
def reading_marks(kind: type) -> dict[str, tuple[ReadWith, ...]]:
    """{field: its ReadWith marks} of a dataclass."""
    marks = {name: getattr(hint, "__metadata__", ()) for name, hint in field_types(kind).items()}
    return {name: tuple(mark for mark in found if isinstance(mark, ReadWith)) for name, found in marks.items()}


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

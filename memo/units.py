"""Units that people read and write: GiB is 2^30 everywhere, 1K tokens are 1,024, 1K of anything else is 1,000."""

import re

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

K_TOKENS = 1 << 10
"""Tokens in 1K tokens: lengths of sequences are powers of two, and a 128K context is one of 131,072 tokens."""
K_OTHERS = 1000
"""1K of anything else that is counted: parameters (8B are 8,000,000,000), steps, samples."""

_COUNT = re.compile(r"([+-]?\d+(?:\.\d+)?)([KMBT]?)")
_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)([KMG]?)(?:iB)?")

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


def round_up(value: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


def element_bytes(dtype: str) -> tuple[int, int]:
    """Bytes of an element of a model of this dtype, and of its sums and statistics, which are wide: fp32, or fp64 for
    fp64."""
    narrow = DTYPE_BYTES[dtype]
    return narrow, max(4, narrow)


def parse_count(text: str, k: int) -> int:
    """`'512K'` -> 524288 with k = 1024: a whole number, alone or times k (K), k^2 (M), k^3 (B), k^4 (T).

    Small letters and underscores between digits are accepted. Raises ValueError for any other text, and if the product
    is not a whole number.
    """
    found = _COUNT.fullmatch(text.strip().replace("_", "").upper())
    if found is None:
        raise ValueError(text)
    return _whole(found[1], k ** " KMBT".index(found[2] or " "), text)


def parse_bytes(text: str) -> int:
    """`'64KiB'` -> 65536: a number of bytes, KiB, MiB or GiB; iB may be left out. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip().replace("_", ""))
    if found is None:
        raise ValueError(text)
    return _whole(found[1], KIB ** " KMG".index(found[2] or " "), text)


def _whole(digits: str, unit: int, text: str) -> int:
    whole, _, part = digits.partition(".")
    parts = int(whole + part) * unit  # in integers: a float holds 53 bits
    if parts % 10 ** len(part):
        raise ValueError(text)
    return parts // 10 ** len(part)


def format_bytes(num_bytes: float) -> str:
    """`1536` -> `'1.50 KiB'`."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:,.2f} {unit}"
    return f"{num_bytes:.0f} B"


def format_count(count: float) -> str:
    """`8030261248` -> `'8.03B'`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(count) >= size:
            return f"{count / size:.2f}{unit}"
    return f"{count:.0f}"


def format_duration_s(seconds: float) -> str:
    """`5400` -> `'1.5 h'`."""
    for unit, size in (("days", 86400.0), ("h", 3600.0), ("min", 60.0)):
        if abs(seconds) >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.2f} s"

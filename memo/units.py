"""Units that people read: GiB is 2^30 everywhere, K tokens are 1024."""

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

DTYPE_BYTES = {"bf16": 2, "fp32": 4, "fp64": 8}


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

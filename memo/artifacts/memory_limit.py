"""A bound on the memory that this process takes for a while, which the kernel enforces.

Libraries that unpack files of strangers take what such a file asks for: a kilobyte of Parquet can stand for gigabytes.
Beyond the bound they raise MemoryError, which says of the file that it expands too far.
"""

import contextlib
import os
import resource
from collections.abc import Iterator


def address_space_bytes() -> int:
    """The address space of this process, now; libraries reserve much that they never touch."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def limited_memory(num_bytes: int) -> Iterator[None]:
    """A context in which the address space of this process, all its threads included, is at most `num_bytes`."""
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (num_bytes, before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))

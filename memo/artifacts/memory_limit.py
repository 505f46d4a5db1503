"""A temporary limit on the memory of this process, which the kernel enforces.

Libraries that unpack untrusted files allocate as much as the file requests: a kilobyte of Parquet can unpack to
gigabytes. Beyond the limit they raise MemoryError, which means that the file expands too far.
"""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def limited_memory(more_bytes: int) -> Iterator[None]:
    """A context in which the address space of this process, with all its threads, may grow by `more_bytes`."""
    with open("/proc/self/statm", "rb") as file:  # the present size; libraries reserve much that they never touch
        now_bytes = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (now_bytes + more_bytes, before, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min(limits), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (before, hard))

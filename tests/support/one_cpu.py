"""One CPU for programs that would take all of them, beside other tests."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Processes that begin here get one: threads that wait for each other are slow where others run as well."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(before))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

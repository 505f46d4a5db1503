"""Limits programs that would take all CPUs to one CPU, because other tests run beside them."""

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def on_one_cpu() -> Iterator[None]:
    """Give processes that start inside one CPU: threads that wait for each other are slow beside other processes."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice(sorted(before))})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)

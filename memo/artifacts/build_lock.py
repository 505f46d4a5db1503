"""A lock that lets one process of a machine build a library while all other processes wait. No torch."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from memo.errors import is_reporting_rank, tell

TELL_AFTER_S = 3.0
"""A longer wait is reported on standard error: a build takes seconds or minutes, depending on the library."""
_POLL_S = 0.05


@contextlib.contextmanager
def build_lock(path: Path, what: str, *, works_without: bool = False) -> Iterator[None]:
    """A context that one process of this machine enters at a time. The lock ends with its process.

    Args:
        what: the name of the library, for the message of waiting processes.
        works_without: whether to enter without a lock if the file system has no locks (some network file systems);
            else this raises OSError.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "w") as file:
        try:
            _wait(file.fileno(), path, what)
        except OSError:
            if not works_without:
                raise
        yield


def _wait(descriptor: int, path: Path, what: str) -> None:
    told_at_s = time.monotonic() + TELL_AFTER_S
    while not _is_ours(descriptor):
        if time.monotonic() >= told_at_s:
            if is_reporting_rank():
                tell(f"waiting for another process that builds {what}, which holds {path}")
            return fcntl.flock(descriptor, fcntl.LOCK_EX)
        time.sleep(_POLL_S)


def _is_ours(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True

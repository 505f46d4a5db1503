"""A line on the terminal about what a command is doing, where it takes longer than a moment."""

import sys
import threading
import time
from types import TracebackType
from typing import Self

_AFTER_S = 2.0
_EVERY_S = 1.0
_CLEARED = "\r\033[K"


class Waiting:
    """A context manager: standard error, where it is a terminal, shows what is done and for how long.

    The line comes after a moment, changes each second, and is gone at the end.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._start_s = time.monotonic()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._show, daemon=True) if sys.stderr.isatty() else None

    def tell(self, what: str) -> None:
        """What is done from now on."""
        self._what = what

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over.set()
        if self._thread is not None:
            self._thread.join()

    def _show(self) -> None:
        pause_s = _AFTER_S
        while not self._is_over.wait(pause_s):
            print(
                f"{_CLEARED}{self._what}: {time.monotonic() - self._start_s:.0f} s", end="", file=sys.stderr, flush=True
            )
            pause_s = _EVERY_S
        if pause_s == _EVERY_S:
            print(_CLEARED, end="", file=sys.stderr, flush=True)

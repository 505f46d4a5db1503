"""A bar on a terminal that shows the progress of a build, its bytes a second and the time that is left."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from memo.units import format_bytes


class Progress:
    """A context manager around one pass over the inputs.

    Args:
        what: is done to them, in a word or two.
        total_bytes: of all files on disk.
        is_shown: draw the bar where standard error is a terminal.
    """

    def __init__(self, what: str, total_bytes: int, is_shown: bool = True) -> None:
        self._what, self._total_bytes = what, total_bytes
        self._is_shown = is_shown and sys.stderr.isatty()
        self._bar: Any = None
        self._start_s = time.perf_counter()

    def __enter__(self) -> Self:
        if self._is_shown:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
            from rich.progress import Progress as RichProgress

            columns = (TextColumn(self._what), BarColumn(24), DownloadColumn(binary_units=True), TransferSpeedColumn())
            self._bar = RichProgress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._what, total=self._total_bytes)
            self._bar.start()
        return self

    def reach(self, done_bytes: int) -> None:
        """So much of the files has been read and written as tokens."""
        if self._bar is not None:
            self._bar.update(self._task, completed=done_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._start_s


def speed_line(num_bytes: int, seconds: float) -> str:
    """`read 1.50 GiB in 12.3 s, 124.88 MiB a second`."""
    return f"read {format_bytes(num_bytes)} in {seconds:.1f} s, {format_bytes(num_bytes / max(seconds, 1e-9))} a second"

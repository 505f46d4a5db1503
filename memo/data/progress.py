"""A progress bar for a build on a terminal, with bytes per second and the remaining time."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(what: str, total_bytes: int, is_shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A context around one pass over the inputs; call its value with the number of bytes that are done.

    Args:
        what: the name of the work, in a word or two.
        total_bytes: bytes of all files on disk.
        is_shown: draw the bar if standard error is a terminal.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda done_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn(what), BarColumn(24), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)

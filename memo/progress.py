"""A line on the terminal that shows what a command is doing, and for how long; it vanishes at the end."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def waiting(what: str, total_bytes: int | None = None, is_shown: bool = True) -> Iterator[Callable[..., None]]:
    """A context in which standard error, if it is a terminal, shows the work `what` if `is_shown`.

    With `total_bytes`, the bytes of all files on disk, it shows a bar with bytes per second and the remaining time.
    Call its value with completed=BYTES or description=TEXT to change the line.
    """
    if not (is_shown and sys.stderr.isatty()):
        yield lambda **changes: None
        return
    from rich import progress as rich
    from rich.console import Console

    columns = [rich.TextColumn("{task.description}", markup=False), rich.TimeElapsedColumn()]
    if total_bytes is not None:
        bar = rich.BarColumn(24), rich.DownloadColumn(binary_units=True), rich.TransferSpeedColumn()
        columns[1:] = *bar, rich.TimeRemainingColumn()
    with rich.Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(what, total=total_bytes)
        yield lambda **changes: line.update(task, **changes)

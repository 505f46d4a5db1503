"""A line on the terminal that shows what a command is doing, and for how long."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A context in which standard error, if it is a terminal, shows what is being done; the line vanishes at the end.

    Call its value with a text to change the line.
    """
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    from rich.console import Console
    from rich.progress import Progress, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}", markup=False), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as line:
        task = line.add_task(what, total=None)
        yield lambda what: line.update(task, description=what)

"""A line on the terminal about what a command is doing, and for how long."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def waiting(what: str) -> Iterator[Callable[[str], None]]:
    """A context in which standard error, where it is a terminal, shows what is done; the line is gone at the end.

    Its value is told what is done from then on.
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

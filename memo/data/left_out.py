"""Records and files that cannot be read: the first one ends a build, or they are left out, counted and listed."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from memo.errors import DataError
from memo.standard_streams import visible

_MOST_TOLD = 5

Item = TypeVar("Item")
Found = TypeVar("Found")
Refuse = Callable[[DataError], None]
"""Is given the error about something that cannot be read, and raises it, or returns to leave that out."""


def raise_it(error: DataError) -> None:
    """A `Refuse` that leaves nothing out."""
    raise error


def read_each(items: Iterable[Item], read: Callable[[Item], Found], refuse: Refuse) -> Iterator[Found]:
    """`read` of each item; an item for which it raises DataError is left to `refuse`."""
    for item in items:
        try:
            found = read(item)
        except DataError as error:
            refuse(error)
            continue
        yield found


class LeftOut:
    """Records and files that do not become documents.

    Args:
        skip: leave out what cannot be read; else the first of it ends the build.
        ignored: files of folders that are of no kind that is taken.
    """

    def __init__(self, skip: bool = False, ignored: Sequence[Path] = ()) -> None:
        self.skip, self.ignored = skip, tuple(ignored)
        self.begin()

    def begin(self) -> None:
        """Count from 0, for another pass over the same inputs."""
        self.num_unreadable = 0
        self._first: list[str] = []

    def refuse(self, error: DataError) -> None:
        """Raises the error; or counts it, where such things are left out."""
        if not self.skip:
            raise hinted(error) from None
        self.count(str(error))

    def count(self, message: str) -> None:
        """One more record or file that is left out."""
        self.num_unreadable += 1
        if len(self._first) < _MOST_TOLD:
            self._first.append(message)

    def lines(self) -> list[str]:
        """For people to read, names as `visible` shows them; empty where nothing was left out."""
        told = []
        if self.ignored:
            names = ", ".join(map(str, self.ignored[:_MOST_TOLD]))
            more = ", ..." if len(self.ignored) > _MOST_TOLD else ""
            told.append(f"left out {len(self.ignored):,} files of other kinds: {names}{more}")
        if self.num_unreadable:
            told.append(f"left out {self.num_unreadable:,} that could not be read:")
            told += [f"  {message}" for message in self._first]
            if self.num_unreadable > len(self._first):
                told.append(f"  and {self.num_unreadable - len(self._first):,} more")
        return [visible(line) for line in told]


def hinted(error: DataError) -> DataError:
    """The error about what cannot be read, with the flag that leaves it out."""
    return DataError(f"{error} (--skip-unreadable leaves out what cannot be read)")

"""Standard input, output and error of a process whose streams may be closed, full, or without a reader.

    a stream is closed (`>&-`)      it is opened on /dev/null, so that no file gets its number
    standard output fails           OutputError, which differs from the errors of all other files
    it is a terminal                control characters, such as those in a file's name, are shown and not obeyed
    standard error fails            the process goes on, and only its exit status tells the result

Characters that the encoding of a stream lacks, as in a file name that is no UTF-8, are written as escapes.
"""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import TextIO

# Control characters move the cursor or change a terminal; only the end of a line and a tabulator are text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_OPENED_AS = (os.O_RDONLY, os.O_RDONLY, os.O_WRONLY)
"""Modes in which closed streams are opened. Output is opened for reading, so that a write to it fails."""


class OutputError(OSError):
    """Standard output cannot be written."""


class _Output(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        with _told():
            return super().write(_CONTROL.sub(_escaped, text) if self.isatty() else text)

    def flush(self) -> None:
        with _told():
            super().flush()


class _Errors(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def use_streams() -> None:
    """Make the streams of this process behave as above, unless they are already replaced, as in a notebook."""
    for number, mode in enumerate(_OPENED_AS):
        try:
            os.fstat(number)
        except OSError:
            _open(number, mode)
    if sys.stdout is sys.__stdout__:
        sys.stdout = _replaced(sys.stdout, _Output, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _replaced(sys.stderr, _Errors, 2)


def drop_output() -> None:
    """Discard text that still waits for standard output, as Python would fail again at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def visible(text: str) -> str:
    """`text` on one line, with escapes for characters that a terminal would obey or not show."""
    return "".join(each if each.isprintable() else _escape(each) for each in text)


def _open(number: int, mode: int) -> None:
    opened = os.open(os.devnull, mode)
    if opened != number:
        os.dup2(opened, number)
        os.close(opened)
    os.set_inheritable(number, True)


def _replaced(stream: TextIO | None, kind: type[_Output] | type[_Errors], number: int) -> TextIO:
    if stream is None:  # it was closed when Python started
        return kind(io.BufferedWriter(io.FileIO(number, "w", closefd=False)), "utf-8", "backslashreplace")
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.flush()
    return kind(
        stream.buffer,
        stream.encoding,
        "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OutputError(error.errno, error.strerror, "standard output") from None


def _escaped(found: re.Match[str]) -> str:
    return _escape(found[0])


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")

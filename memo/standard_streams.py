"""Standard input, output and error of a process whose streams may be closed, full, or read by nobody any more.

    a stream is closed (`>&-`)      its number must not become that of a file, so it is opened on /dev/null
    standard output fails           OutputError, which no error of another file can be taken for
    it is a terminal                control characters, such as those of a file's name, are shown and not obeyed
    standard error fails            nobody is left to tell, so the process goes on, and its exit status speaks

Text that the encoding of a stream does not have, such as a file name that is no UTF-8, is written with escapes.
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
"""Of closed streams. Output is opened for reading: what writes to it is told that it cannot."""


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
    """Let the streams of this process behave as above, unless they are already replaced, as in a notebook."""
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
    """Let what is still to be written to standard output go nowhere, as Python would fail again when it ends."""
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

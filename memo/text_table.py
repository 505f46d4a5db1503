"""Text tables: how every command lays out rows of cells for people."""

import shutil
import sys
import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest
from math import inf

from memo.standard_streams import visible

_GAP = "  "
_NARROWEST = 12
"""The least characters of a column whose cells are wrapped."""


def terminal_columns() -> int | None:
    """Characters of a line of the terminal; None where standard output is a file or a pipe."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def text_table(
    rows: Sequence[Sequence[str]],
    left: Collection[int] = (0,),
    *,
    columns: int | None = None,
    spare: Sequence[int] = (),
    wrapped: Sequence[int] = (),
) -> str:
    """One line for each row, with columns two spaces apart: those of `left` are aligned left, all others right.

    All rows have as many cells as the first row, which may be a head. Lines have no blanks at their ends. A cell may
    hold text from a file of strangers: it is written as `visible` shows it.

    Args:
        columns: the most characters of a line; None for any number. Columns are left out and cells wrapped until lines
            fit.
        spare: columns that may be left out, in this order; the last line names them by the head.
        wrapped: columns whose cells may then take several lines.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    limit = inf if columns is None else columns
    kept = list(range(len(widths)))
    for at in spare:
        if _line_width(widths, kept) > limit:
            kept.remove(at)
    for at in wrapped:
        excess = _line_width(widths, kept) - limit
        if excess > 0:
            widths[at] = min(widths[at], max(_NARROWEST, widths[at] - int(excess)))
    lines = []
    for row in rows:
        for parts in zip_longest(*(_wrapped(row[at], widths[at]) for at in kept), fillvalue=""):
            padded = [
                part.ljust(widths[at]) if at in left else part.rjust(widths[at])
                for at, part in zip(kept, parts, strict=True)
            ]
            lines.append(_GAP.join(padded).rstrip())
    gone = [name for at, name in enumerate(rows[0]) if at not in kept]
    if gone:
        lines += ["", *textwrap.wrap(f"not shown for want of room: {', '.join(gone)} (--wide shows all)", columns or 0)]
    return "\n".join(lines)


def html_table(rows: Sequence[Sequence[str]], title: str) -> str:
    """The same for notebooks, the first row as a head, below `title`."""
    from html import escape  # for notebooks alone

    head, *body = ([escape(visible(cell)) for cell in row] for row in rows)
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body]
    names = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table><caption>{escape(visible(title))}</caption><tr>{names}</tr>{''.join(lines)}</table>"


def _line_width(widths: Sequence[int], kept: Sequence[int]) -> int:
    return sum(widths[at] for at in kept) + len(_GAP) * (len(kept) - 1)


def _wrapped(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width)

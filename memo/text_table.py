"""Text tables: how every command lays out rows of cells for people."""

from collections.abc import Collection, Sequence
from html import escape

from memo.standard_streams import visible


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """One line a row, columns two spaces apart: those of `left` begin under each other, all others end so.

    All rows have as many cells as the first, which may be a head. Lines have no blanks at their ends. A cell may hold
    what a file of strangers says: it is written as `visible` shows it.
    """
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = zip(row, widths, strict=True)
        padded = [cell.ljust(width) if at in left else cell.rjust(width) for at, (cell, width) in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def html_table(rows: Sequence[Sequence[str]], title: str) -> str:
    """The same for notebooks, the first row as a head, below `title`."""
    head, *body = ([escape(visible(cell)) for cell in row] for row in rows)
    lines = [f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in body]
    names = "".join(f"<th>{cell}</th>" for cell in head)
    return f"<table><caption>{escape(visible(title))}</caption><tr>{names}</tr>{''.join(lines)}</table>"

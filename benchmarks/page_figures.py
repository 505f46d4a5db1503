"""Writes the figures of the README and the guide from the rows of benchmarks/results.

A page holds a figure, or a whole table, between two invisible marks:

    <!--figure NAME-->39,936<!--/figure-->

`write` replaces the text between the marks with FIGURES[NAME]; `python benchmarks/report.py` calls it. A mark at the
beginning of a line stands alone on this line, because Markdown takes the rest of such a line for HTML.
"""

import functools
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import figures_foreseen
import figures_measured
import rows

PAGES = (rows.ROOT / "README.md", *sorted((rows.ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"<!--figure (\w+)-->(.*?)<!--/figure-->", re.DOTALL)
FIGURES: Mapping[str, Callable[[], str]] = {**figures_measured.FIGURES, **figures_foreseen.FIGURES}


@functools.cache
def figure(name: str) -> str:
    """Return the text of a figure. Raises KeyError for a name that is not in FIGURES."""
    return FIGURES[name]()


def filled(text: str) -> str:
    """Return a page with every figure replaced by that of the rows."""
    return MARKED.sub(lambda mark: f"<!--figure {mark[1]}-->{_shown(mark)}<!--/figure-->", text)


def stale(page: Path) -> Iterator[str]:
    """Yield a line for each figure of a page that differs from that of the rows."""
    for mark in MARKED.finditer(page.read_text(encoding="utf-8")):
        if mark[2] != _shown(mark):
            yield f"{page.name}: {mark[1]} is {mark[2].strip()!r}, but its rows say {figure(mark[1])!r}"


def write() -> list[Path]:
    """Write the figures of all pages; return the pages that changed."""
    changed = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        new = filled(text)
        if new != text:
            page.write_text(new, encoding="utf-8")
            changed.append(page)
    return changed


def _shown(mark: re.Match[str]) -> str:
    """Return the text between two marks: a block between empty lines if the marks stand alone, else the bare figure."""
    value = figure(mark[1])
    return f"\n\n{value}\n\n" if mark[2].startswith("\n") else value

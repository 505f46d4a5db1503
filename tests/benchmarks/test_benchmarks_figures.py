"""Figures of the README and the guide are those of the rows, and the rows of plans are what `memo plan` says."""

import re
from pathlib import Path

import figures_foreseen
import foreseen_plans
import page_figures
import pytest
import rows

QUICK = ("h100x8_512k_512gib", "h100x8_longest", "h100x1_longest", "24gib_128k_disk", "h200x1_largest_gpt")
"""Questions that `memo plan` answers within seconds, of every kind; the others are asked in `make test-full`."""


@pytest.mark.parametrize("page", page_figures.PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_figures_of_the_rows(page: Path) -> None:
    assert not list(page_figures.stale(page)), "run `python benchmarks/report.py`"


def test_every_figure_is_shown_somewhere() -> None:
    shown = {mark[1] for page in page_figures.PAGES for mark in page_figures.MARKED.finditer(page.read_text())}
    assert shown == set(page_figures.FIGURES)


@pytest.mark.parametrize("page", page_figures.PAGES, ids=lambda page: page.stem)
def test_every_mark_is_whole_and_does_not_hide_its_line(page: Path) -> None:
    """Markdown takes a line that begins with a comment for HTML: what else stands on it would be shown as it is."""
    text = page.read_text(encoding="utf-8")
    assert text.count("<!--figure ") == text.count("<!--/figure-->") == len(page_figures.MARKED.findall(text))
    assert not re.findall(r"^ *<!--/?figure[^>]*-->.*\S.*$", text, re.MULTILINE)


def test_a_stale_figure_is_told_and_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "It is <!--figure reach_memo-->12<!--/figure--> tokens.\n\n<!--figure largest-->\nold\n<!--/figure-->\nend\n"
    )
    told = list(page_figures.stale(page))
    assert len(told) == 2
    assert told[0] == f"page.md: reach_memo is '12', but its rows say {page_figures.figure('reach_memo')!r}"
    monkeypatch.setattr(page_figures, "PAGES", (page,))
    assert page_figures.write() == [page]
    assert not list(page_figures.stale(page)) and page_figures.write() == []
    tokens, table = page_figures.figure("reach_memo"), page_figures.figure("largest")
    assert page.read_text() == (
        f"It is <!--figure reach_memo-->{tokens}<!--/figure--> tokens.\n\n"
        f"<!--figure largest-->\n\n{table}\n\n<!--/figure-->\nend\n"
    )


def test_rows_of_plans_are_of_the_questions() -> None:
    kept = {row["name"]: row["arguments"] for row in rows.read(foreseen_plans.FILE)}
    assert kept == foreseen_plans.QUESTIONS, "run `python benchmarks/foreseen_plans.py`"


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in QUICK else pytest.mark.full) for name in foreseen_plans.QUESTIONS],
)
def test_plans_are_as_memo_says(name: str) -> None:
    """As far as pages show: an answer may differ from its row by what no page prints."""
    kept, asked = figures_foreseen.row_of(name), foreseen_plans.ask(name)
    told = figures_foreseen.shown(kept), figures_foreseen.shown(asked)
    assert told[0] == told[1], "run `python benchmarks/foreseen_plans.py`"


@pytest.mark.full
@pytest.mark.parametrize("picture", foreseen_plans.PICTURES)
def test_pictures_of_plans_are_as_memo_draws(picture: str, tmp_path: Path) -> None:
    foreseen_plans.draw(picture, tmp_path / picture)
    kept = rows.ROOT / "docs" / "images" / picture
    assert (tmp_path / picture).read_bytes() == kept.read_bytes(), "run `python benchmarks/foreseen_plans.py`"

"""Figures, tables and drawings of pages are those of the rows, and what the code says where it is asked again."""

import re
from pathlib import Path

import figures_foreseen
import foreseen_plans
import full_size
import page_figures
import pytest
import report
import rows
from swap_drawing import draw_text
from swap_plans import plan_stages, simulate_swaps, stage_table

from memo.simulate.streams import LayerTimes
from memo.spec.schedule import Pipeline

QUICK = ("h100x8_512k_512gib", "h100x8_longest", "h100x1_longest", "24gib_128k_disk", "h200x1_largest_gpt")
"""EvaluationApi that `memo plan` answers within seconds, of every kind; the others are asked in `make test-full`."""


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


def test_the_page_is_that_of_the_results() -> None:
    assert report.PAGE.read_text(encoding="utf-8") == report.page(), "run `python benchmarks/report.py`"


def test_the_page_on_memory_has_the_rows_at_full_size() -> None:
    assert full_size.table(rows.read("full_size")) in (rows.ROOT / "docs" / "memory.md").read_text(encoding="utf-8")


def test_the_page_on_swapping_shows_what_the_code_prints() -> None:
    """The timeline of four layers, and the table of stages."""
    page = (rows.ROOT / "docs" / "swapping.md").read_text(encoding="utf-8")
    (stage,) = plan_stages(Pipeline(stages=1, chunks=1, microbatches=1), num_layers=4)
    drawn = draw_text(simulate_swaps(stage.plan, LayerTimes(1.0, 2.0, 1.0, 2.0)), width=96)
    table = stage_table(plan_stages(Pipeline(stages=4, chunks=1, microbatches=8), num_layers=16), record_bytes=2**30)
    assert f"```\n{drawn}\n```" in page and f"```\n{table}\n```" in page


def test_the_examples_of_the_page_on_swapping_are_python() -> None:
    examples = re.findall(r"```python\n(.*?)```", (rows.ROOT / "docs" / "swapping.md").read_text(), re.DOTALL)
    assert len(examples) == 3
    for example in examples:
        compile(example, "docs/swapping.md", "exec")
        for line in example.splitlines():
            if line.startswith("from "):
                exec(line, {})

"""The page that `memo plan --html` writes."""

from dataclasses import replace
from pathlib import Path

import pytest
from pages import Page

from memo.errors import ArtifactError
from memo.report import plan_page
from memo.search.plan import Plan
from memo.search.planning import plan
from memo.search.tables import Commands, cells, errors


@pytest.fixture(scope="module")
def found() -> Plan:
    return plan("gpt-7b", 4, seq_len=131072, global_batch_size=8, top=3)


@pytest.fixture(scope="module")
def page(found: Plan) -> str:
    patch = pytest.MonkeyPatch()
    patch.setattr(plan_page, "plans_by_length", lambda question, tell: [found])  # each search is tested elsewhere
    try:
        return plan_page.plan_page(found, Commands("torchrun the-best"))
    finally:
        patch.undo()


def test_it_has_the_table_with_errors_and_all_pictures(found: Plan, page: str) -> None:
    seen = Page(page)
    rows = cells(found.choices, found.question, found.ties())
    assert len(rows) == 4 and all(cell in seen.texts for row in rows for cell in row)
    assert all(line in seen.texts for line in errors(found, found.choices))
    assert "run: torchrun the-best" in seen.texts
    assert any(text.startswith("gpt-7b on 4 x a800-80") for text in seen.texts)
    assert len(seen.images()) == 3


def test_it_asks_for_nothing_outside(page: str) -> None:
    assert "http" not in page.replace("http-equiv", "") and "<script" not in page


def test_memory_adds_up_and_refusals_are_told(found: Plan, page: str) -> None:
    assert found.best is not None
    assert f"{found.best.sized.memory.total / 2**30:,.2f}" in Page(page).texts
    assert all(refused.text in Page(page).texts for refused in found.refusals)


def test_the_timeline_has_a_row_for_each_stream_that_works(found: Plan) -> None:
    """Of the best with swapping, whose copies the drawing must show; and of a step without any."""
    best = found.best
    assert best is not None and best.strategy.swaps
    spans = plan_page.first_stage(found.question, best)
    assert {"compute", "offload", "prefetch"} <= {span.row for span in spans} and {span.stage for span in spans} == {0}
    (axes,) = plan_page._draw_step(spans).axes
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        row for row in plan_page.ROWS if row in {span.row for span in spans}
    ]


def test_a_path_that_cannot_be_written(found: Plan, page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_page, "plan_page", lambda *asked: page)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match=r"--html .*file/plan\.html could not be written .*: check the path"):
        plan_page.write_plan_page(found, Commands(), tmp_path / "file" / "plan.html")
    written = tmp_path / "new" / "plan.html"
    plan_page.write_plan_page(replace(found), Commands(), written)
    assert written.read_text(encoding="utf-8") == page

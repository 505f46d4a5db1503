"""The one table of all commands."""

import pytest

from memo.text_table import html_table, text_table

ROWS = [("", "layout", "step s", "verdict"), ("1", "tp2 cp1", "2.10", "fits"), ("10", "tp4", "11.25", "unsure")]


def test_columns_begin_or_end_under_each_other() -> None:
    assert text_table(ROWS, left=(1, 3)).splitlines() == [
        "    layout   step s  verdict",
        " 1  tp2 cp1    2.10  fits",
        "10  tp4       11.25  unsure",
    ]
    assert text_table([("a", "1"), ("bcd", "22")]).splitlines() == ["a     1", "bcd  22"]


def test_a_row_with_another_number_of_cells_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="shorter"):
        text_table([("a", "b"), ("a",)])


def test_a_cell_of_a_stranger_neither_changes_a_terminal_nor_begins_a_line() -> None:
    assert text_table([("a\x1b[2J\nb", "1")]) == r"a\x1b[2J\nb  1"


def test_the_same_for_a_notebook() -> None:
    found = html_table([("layout", "GPU GiB"), ("<tp2>\n", "1")], "a & b")
    assert found == (
        "<table><caption>a &amp; b</caption><tr><th>layout</th><th>GPU GiB</th></tr>"
        r"<tr><td>&lt;tp2&gt;\n</td><td>1</td></tr></table>"
    )

"""The one table of all commands."""

import io

import pytest

from memo.text_table import html_table, terminal_columns, text_table

ROWS = [("", "layout", "step s", "verdict"), ("1", "tp2 cp1", "2.10", "fits"), ("10", "tp4", "11.25", "unsure")]


def test_columns_begin_or_end_under_each_other() -> None:
    assert text_table(ROWS, left=(1, 3)).splitlines() == [
        "    layout   step s  verdict",
        " 1  tp2 cp1    2.10  fits",
        "10  tp4       11.25  unsure",
    ]
    assert text_table([("a", "1"), ("bcd", "22")]).splitlines() == ["a     1", "bcd  22"]


WIDE = [
    ("", "layout", "dp", "activations", "speed"),
    ("1", "tp2 cp1", "4", "alpha auto, swept in 8 tiles", "2,000"),
    ("2", "tp8 cp1 pp1 all_gather", "1", "keep", "1,000"),
]


def test_columns_go_and_cells_are_wrapped_until_lines_fit() -> None:
    def fitted(columns: int | None) -> list[str]:
        return text_table(WIDE, left=(1, 3), columns=columns, spare=(2,), wrapped=(3, 1)).splitlines()

    whole = fitted(None)
    assert whole == text_table(WIDE, left=(1, 3)).splitlines() == fitted(66)
    assert fitted(65) == [
        "   layout                  activations                   speed",
        "1  tp2 cp1                 alpha auto, swept in 8 tiles  2,000",
        "2  tp8 cp1 pp1 all_gather  keep                          1,000",
        "",
        "not shown for want of room: dp (--wide shows all)",
    ]
    assert fitted(50)[:4] == [
        "   layout                  activations       speed",
        "1  tp2 cp1                 alpha auto,       2,000",
        "                           swept in 8 tiles",
        "2  tp8 cp1 pp1 all_gather  keep              1,000",
    ]
    assert max(map(len, fitted(40))) <= 40
    words = " ".join(" ".join(fitted(40)).split())
    assert "tp8 cp1 pp1" in words and "all_gather" in words and "swept in 8" in words


def test_only_a_terminal_has_a_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "97")
    terminal, file = io.StringIO(), io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stdout", terminal)
    assert terminal_columns() == 97
    monkeypatch.setattr("sys.stdout", file)
    assert terminal_columns() is None


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

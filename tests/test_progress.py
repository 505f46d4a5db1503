"""The line that a command shows on the terminal while it works."""

import io
from types import SimpleNamespace

import pytest

from memo.progress import waiting
from memo.search.planning import plans_by_length
from memo.search.question import ask


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, errors: io.StringIO) -> str:
    """What standard error has after two things were done."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stderr", errors)
    with waiting("planning [8]") as doing:
        doing(description="drawing")
    return errors.getvalue()


def test_it_says_what_is_done_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal())
    assert text.index("planning [8]") < text.index("drawing") and "0:00:00" in text
    assert text.endswith("\r\033[1A\033[2K")


def test_nothing_is_said_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO()) == ""


def test_each_length_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.search.planning.longest", lambda question: SimpleNamespace(seq_len=16384))
    told: list[str] = []
    plans_by_length(ask("gpt-7b", 8), told.append)
    assert told == [
        "looking for the longest sequence",
        "planning for 8,192 tokens, 1 of 2 lengths",
        "planning for 16,384 tokens, 2 of 2 lengths",
    ]

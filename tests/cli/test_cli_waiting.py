"""The line that a command shows on the terminal while it works."""

import io
import time
from types import SimpleNamespace

import pytest

from memo.cli import waiting
from memo.cli.waiting import Waiting
from memo.search.planning import plans_by_length
from memo.search.question import ask


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waiting, "_EVERY_S", 0.001)


def shown(monkeypatch: pytest.MonkeyPatch, errors: io.StringIO, after_s: float) -> str:
    """What standard error has after a wait that ends once it shows the second thing, or at once if it comes late."""
    monkeypatch.setattr(waiting, "_AFTER_S", after_s)
    monkeypatch.setattr("sys.stderr", errors)
    with Waiting("planning") as line:
        deadline_s = time.monotonic() + (60 if errors.isatty() and after_s < 1 else 0)
        while "planning" not in errors.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.001)
        line.tell("drawing")
        while "drawing" not in errors.getvalue() and time.monotonic() < deadline_s:
            time.sleep(0.001)
    return errors.getvalue()


def test_it_says_what_is_done_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), after_s=0.001)
    assert "\r\033[Kplanning: 0 s" in text and "\r\033[Kdrawing: " in text and text.endswith("\r\033[K")


def test_nothing_is_said_of_what_is_quick_or_where_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), after_s=3600.0) == ""
    assert shown(monkeypatch, io.StringIO(), after_s=0.001) == ""


def test_each_length_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.search.planning.longest", lambda question: SimpleNamespace(seq_len=16384))
    told: list[str] = []
    plans_by_length(ask("gpt-7b", 8), told.append)
    assert told == [
        "looking for the longest sequence",
        "planning for 8,192 tokens, 1 of 2 lengths",
        "planning for 16,384 tokens, 2 of 2 lengths",
    ]

"""Output of `memo plan` and other commands, cached for tests that ask the same question."""

import contextlib
from unittest import mock

import pytest
from remembered import remembered

from memo.cli.main import main
from memo.search.longest import remedies
from memo.search.planning import answer
from memo.search.ranking import search

_REMEMBERED = {
    "memo.cli.plan.answer": remembered(answer),
    "memo.search.comparing.search": remembered(search),
    "memo.search.tables.remedies": remembered(remedies),
}


def answered(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with contextlib.ExitStack() as stack:
        for place, function in _REMEMBERED.items():
            stack.enter_context(mock.patch(place, function))
        assert main(argv) == 0
    return capsys.readouterr().out


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    return answered(["plan", *argv], capsys)

"""What `memo plan` prints; tests that ask the same question look at one answer."""

from unittest import mock

import pytest
from remembered import remembered

from memo.cli import plan
from memo.cli.main import main

_ANSWER = remembered(plan.answer)


def printed(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with mock.patch.object(plan, "answer", _ANSWER):
        assert main(["plan", *argv]) == 0
    return capsys.readouterr().out

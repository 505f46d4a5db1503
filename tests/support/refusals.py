"""The message of memo for a command line that it refuses."""

from collections.abc import Sequence

import pytest

from memo.cli.main import main
from memo.errors import EXIT_REFUSED


def refusal(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Run memo, and return its message; it must be one line and the only output."""
    with pytest.raises(SystemExit) as refused:
        main(argv)
    captured = capsys.readouterr()
    assert (refused.value.code, captured.out) == (EXIT_REFUSED, "")
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err.removeprefix("error: ").rstrip("\n")

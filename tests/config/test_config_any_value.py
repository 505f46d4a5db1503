"""Every flag of a run with values that make no sense: accepted, or refused by one line; never a traceback or a hang."""

import dataclasses

import pytest

from memo.config.flag_table import Entry, entries_of
from memo.config.flags import load_run
from memo.config.run import RunConfig

VALUES = (
    "",
    "x",
    "-1",
    "0",
    "nan",
    "inf",
    "1e999",
    "/dev/null",
    ".",
    "9" * 30,
    "9" * 400,
    "-" + "9" * 20,
    "None",
    "1K",
    "0.5",
    "auto",
    "é",
    "\udcff",
    "a,b=c",
)
ENTRIES: list[Entry] = [
    entry
    for section in dataclasses.fields(RunConfig)
    for entry in entries_of(section.default_factory)  # type: ignore[arg-type]
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.flag)
def test_any_value(entry: Entry, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for value in VALUES:
        try:
            load_run(["--mock-data", f"{entry.flag}={value}"])
        except SystemExit as stopped:
            message = capsys.readouterr().err
            assert stopped.code == 2, value
            assert message.startswith("error: ") and message.count("\n") == 1, value
            assert len(message) < 900, value

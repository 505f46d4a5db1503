"""refusals.txt is the table of what memo refuses: each command line is run, and its message must hold the row's words.

Every one ends with status 2 and one line on standard error, which says what to type instead, and leaves nothing behind.
All run in this process, in the folder of tests/support/users_home.py: a person waits for each of them.
"""

import ast
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import users_home
from refusals import refusal
from suggestions import check_parses, suggested


class Row(NamedTuple):
    line: str
    says: list[str]
    """Words of the message, in their order."""
    file: str = ""
    """One that is there for this row."""
    content: str = ""


def rows() -> list[Row]:
    """Of refusals.txt: a file where there is one, a command line, and words of its message with " ... " between."""
    found, line, file = [], "", ("", "")
    for text in Path(__file__).with_name("refusals.txt").read_text().splitlines():
        if named := re.fullmatch(r"(\S+\.\w+): ([\"'].*[\"'])", text):
            file = named[1], ast.literal_eval(named[2])
        elif text.startswith("    "):
            assert line, f"nothing is refused with {text.strip()}"
            found.append(Row(line, text.strip().split(" ... "), *file))
            line, file = "", ("", "")
        elif text and not text.startswith("#"):
            assert not line, f"nothing is said of {line}"
            line = text
    return found


ROWS = rows()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    users_home.fill(folder)
    return folder


def test_no_row_stands_twice() -> None:
    assert len({(row.line, row.content) for row in ROWS}) == len(ROWS) > 400


@pytest.mark.parametrize("row", ROWS, ids=[row.line for row in ROWS])
def test_refused(row: Row, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("memo.data.corpus_builder.standard_library", lambda: home / "texts")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    words = shlex.split(row.line)
    if words[0] != "memo":  # a launcher has started so many ranks
        monkeypatch.setenv(*words.pop(0).split("="))
    before = sorted(os.walk(home))
    if row.file:
        Path(row.file).write_bytes(row.content.encode("utf-8", "surrogateescape"))
    try:
        message = refusal(words[1:], capsys)
    finally:
        if row.file:
            Path(row.file).unlink()
    assert sorted(os.walk(home)) == before, "what is refused leaves nothing behind"
    rest = f"error: {message}"
    for part in row.says:
        assert part in rest, message
        rest = rest.partition(part)[2]
    assert len(message) < 850  # some list all presets
    for command in suggested(f"error: {message}\n"):
        check_parses(command, row.line)

"""refusals.txt is the table of command lines that memo refuses: each is run, and its message must hold the row's words.

Every one ends with status 2 and one line on standard error, which says what to type instead. All run in this process,
in the folder of tests/support/users_home.py: a person waits for each of them.
"""

import os
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import users_home
from refusals import refusal
from suggestions import check_parses, suggested

LINES = [
    line for line in Path(__file__).with_name("refusals.txt").read_text().splitlines() if line[:1] not in ("", "#")
]
ROWS = [(line, says.strip()) for line, says in pairwise(LINES) if says.startswith("    ")]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    users_home.fill(folder)
    return folder


def test_the_table_is_whole() -> None:
    """Each line has its words below it, and no line stands twice."""
    assert 2 * len(ROWS) == len(LINES) and len({line for line, _ in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("line", "says"), ROWS, ids=[line for line, _ in ROWS])
def test_refused(
    line: str, says: str, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(home)
    monkeypatch.setattr("memo.data.corpus_builder.standard_library", lambda: home / "texts")
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    before = sorted(os.walk(home))
    words = shlex.split(line)
    if words[0] != "memo":  # a launcher has started so many ranks
        monkeypatch.setenv(*words.pop(0).split("="))
    message = refusal(words[1:], capsys)
    rest = f"error: {message}"
    for part in says.split(" ... "):
        assert part in rest, message
        rest = rest.partition(part)[2]
    assert len(message) < 700
    for command in suggested(f"error: {message}\n"):
        check_parses(command, line)
    assert sorted(os.walk(home)) == before, "what is refused leaves nothing behind"

"""Commands whose standard streams are closed, full, or read by nobody any more."""

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from processes import SMALL

from memo.errors import EXIT_OUTPUT

QUICK = ["--version"]
REFUSED = ["estimate", "--model", "nope"]
ESTIMATE = ["estimate", "--model", "gpt-7b", "--gpus", "8"]
ALL_CLOSED = "<&- >&- 2>&-"


def memo(args: list[str], redirections: str, folder: Path) -> tuple[int, str]:
    """How a command ends whose streams the shell has redirected; the status, and what it printed on either stream."""
    with (folder / "printed").open("wb") as printed:
        shell = ["bash", "-c", f'exec "$@" {redirections}', "memo", sys.executable, "-m", "memo", *args]
        done = subprocess.run(shell, check=False, stdout=printed, stderr=printed, timeout=600, cwd=folder)
    return done.returncode, (folder / "printed").read_text()


@pytest.mark.parametrize(
    ("args", "redirections", "status", "printed"),
    [
        (QUICK, ">&-", EXIT_OUTPUT, "error: standard output: Bad file descriptor\n"),
        (["plan", "--help"], ">/dev/full", EXIT_OUTPUT, "error: standard output: No space left on device\n"),
        (ESTIMATE, ALL_CLOSED, EXIT_OUTPUT, ""),
        (REFUSED, ALL_CLOSED, 2, ""),
        (REFUSED, "2>/dev/full", 2, ""),
    ],
)
def test_output_that_cannot_be_written_ends_a_command(
    args: list[str], redirections: str, status: int, printed: str, tmp_path: Path
) -> None:
    assert memo(args, redirections, tmp_path) == (status, printed)


@pytest.mark.parametrize("redirections", ["2>&-", "2>/dev/full", "<&-"])
def test_a_command_needs_only_its_output(redirections: str, tmp_path: Path) -> None:
    status, printed = memo(QUICK, redirections, tmp_path)
    assert status == 0 and printed.startswith("memo ")


def test_training_goes_on_without_a_console(tmp_path: Path) -> None:
    """tests/train/test_train_sinks.py has one whose output breaks."""
    args = ["train", *SMALL.split(), "--train-iters", "1", "--save", "run"]
    status, printed = memo(args, ALL_CLOSED, tmp_path)
    assert (status, printed) == (0, "")
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text().strip() == "1"


def test_a_refusal_keeps_its_status_where_output_is_left_unwritten(tmp_path: Path) -> None:
    code = "from memo.errors import *\nwith exit_on_error(): print('a word'); raise ConfigError('no')"
    command = ["bash", "-c", 'exec "$0" -c "$1" >/dev/full', sys.executable, code]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, check=False, cwd=tmp_path, stderr=subprocess.DEVNULL, env=environment)
    assert done.returncode == 2


def test_a_closed_stream_is_no_place_for_a_file(tmp_path: Path) -> None:
    """The first file that a process opens would have its number, and what is printed would be written into it."""
    code = (
        "import sys; from memo.standard_streams import use_streams; use_streams(); file = open('data', 'w'); "
        "print('a word', file=sys.stderr); sys.exit(file.fileno())"
    )
    command = ["bash", "-c", f'exec "$0" -c "$1" {ALL_CLOSED}', sys.executable, code]
    assert subprocess.run(command, check=False, cwd=tmp_path).returncode > 2
    assert (tmp_path / "data").read_text() == ""


def test_what_strangers_name_cannot_change_a_terminal(tmp_path: Path) -> None:
    """An error is one line without control characters; other output is as it is, but on a terminal."""
    name = "a\x1b[2J\nwarning: all is well\x9b\u202e"
    status, printed = memo(["report", name], "", tmp_path)
    assert status == 2 and printed.count("\n") == 1
    assert r"a\x1b[2J\nwarning: all is well\x9b\u202e" in printed
    code = "from memo.errors import exit_on_error\nwith exit_on_error(): print('a\\x1b[2J\\tb\\r')"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, check=True, capture_output=True).stdout == b"a\x1b[2J\tb\r\n"
    ours, theirs = pty.openpty()
    subprocess.run(command, check=True, stdout=theirs)
    os.close(theirs)
    assert os.read(ours, 1000) == rb"a\x1b[2J" + b"\t" + rb"b\r" + b"\r\n"  # a terminal adds the last \r
    os.close(ours)


def test_a_name_that_is_no_text_is_shown_with_escapes(tmp_path: Path) -> None:
    code = "from memo.errors import exit_on_error\nwith exit_on_error(): print('a\\udcff \u20ac')"
    for encoding, shown in (("utf-8", "a\\udcff \u20ac\n"), ("ascii", "a\\udcff \\u20ac\n")):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, env=environment)
        assert done.stdout.decode() == shown

"""The command `memo`: what it prints, how it ends, and that it starts without torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memo import __version__
from memo.cli.main import COMMANDS, main
from memo.errors import RIGHTS

ROOT = Path(__file__).parents[2]


def python(*args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([sys.executable, *args], check=False, capture_output=True, text=True, env=env, timeout=600)


def test_train_refuses_in_a_process_of_its_own() -> None:
    """As it does in this process for every row of refusals.txt."""
    process = python("-m", "memo", "train", "--mock-data", "--seq-length", "1000", "--tp", "16", WORLD_SIZE="16")
    assert (process.returncode, process.stdout) == (2, "")
    says = "error: --num-attention-heads 4 does not divide by --tp 16"
    assert process.stderr.startswith(says) and process.stderr.count("\n") == 1


LOADS = """
import sys
import memo, memo.estimate.admission, memo.config.flags
from memo.cli.main import main
for line in {lines!r}:
    try:
        main(line.split())
    except SystemExit:
        pass
    assert not {unwanted!r} & set(sys.modules), line
"""
WITHOUT_TORCH = [
    *("--help", "data --help", "train --help", "train --tp 3", "finetune --help", "finetune --tp 3", "extend --tp 3"),
    *("profile --help", "profile --tp 3", "rehearse --gpu h100-80 --gpus 8 --model gpt-7b"),
]
FORESEEN = ["estimate --model gpt-7b --tp 8", "plan --model gpt-7b --gpus 8"]
"""Imports are most of what they take: torch takes seconds, psutil 0.1 s."""


@pytest.mark.parametrize(
    ("lines", "unwanted"),
    [(WITHOUT_TORCH, {"torch"}), (FORESEEN, {"torch", "numpy", "pulp", "matplotlib", "psutil"})],
)
def test_nothing_is_loaded_that_is_not_needed(lines: list[str], unwanted: set[str]) -> None:
    process = python("-c", LOADS.format(lines=lines, unwanted=unwanted))
    assert process.returncode == 0, process.stderr


def test_help_is_a_table_of_commands_and_loads_no_flags() -> None:
    code = "import sys\nfrom memo.cli.main import main\nmain(['--help'])\nassert 'memo.config' not in sys.modules"
    process = python("-c", code)
    assert process.returncode == 0, process.stderr
    rows = [line.split(None, 1)[0] for line in process.stdout.splitlines() if line.startswith("  ")]
    assert rows == [command.name for command in COMMANDS] and {"train", "profile", "data"} <= set(rows)


@pytest.mark.parametrize(
    ("script", "command"), [("finetune", "finetune"), ("lora", "finetune"), ("extend_context", "extend")]
)
def test_scripts_of_examples_are_the_commands(script: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    told = python(f"{ROOT}/examples/{script}.py", "--help", PYTHONPATH=str(ROOT))
    assert told.returncode == 0, told.stderr
    assert told.stdout == capsys.readouterr().out
    assert told.stdout.startswith(f"usage: memo {command} [--FLAG VALUE ...]")


def test_version_and_missing_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"memo {__version__}\n"
    assert main([]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("usage: memo COMMAND")


@pytest.mark.parametrize("args", [["--version"], ["estimate", "--model", "gpt-7b", "--gpus", "8"]])
def test_output_that_nobody_reads_ends_a_command_quietly(args: list[str]) -> None:
    """As `memo ... | head` does: a pipe whose reader has gone, and the status that a shell shows of `cat` then."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "memo", *args], check=False, stdout=writer, stderr=subprocess.PIPE, text=True
        )
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_interrupt_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("memo.cli.main.dispatch", interrupted)
    assert main(["plan"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (BrokenPipeError(32, "Broken pipe"), 3, "error: Broken pipe\n"),
        (OSError(28, "No space left on device", "runs/a"), 3, "error: runs/a: No space left on device\n"),
        (PermissionError(13, "Permission denied", "a\nb"), 2, "error: a\\nb: Permission denied: " + RIGHTS + "\n"),
    ],
)
def test_an_error_of_the_system_is_one_line(
    error: OSError, status: int, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def breaks(*_: object) -> int:
        raise error

    monkeypatch.setattr("memo.cli.main.dispatch", breaks)
    with pytest.raises(SystemExit) as ended:
        main(["plan"])
    assert (ended.value.code, capsys.readouterr().err) == (status, message)

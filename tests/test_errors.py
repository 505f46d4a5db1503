"""Who tells an error, in which words, and with which exit status a command ends."""

import ast
from pathlib import Path

import pytest

from memo.errors import (
    EXIT_FAILED,
    EXIT_REFUSED,
    CheckpointError,
    ConfigError,
    MemoError,
    OutOfMemory,
    RankLost,
    exit_on_error,
    is_first_of_node,
    is_reporting_rank,
    tell,
    warn,
)

ROOT = Path(__file__).parents[1]
RANK_3 = "rank 3 (node7, tp 1 cp 0 pp 1 dp 0)"


def ending(error: MemoError, capsys: pytest.CaptureFixture[str], reports: bool) -> tuple[object, str]:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as exit_:
        patch.setattr("memo.errors.is_reporting_rank", lambda: reports)
        with exit_on_error():
            raise error
    return exit_.value.code, capsys.readouterr().err


@pytest.mark.parametrize("reports", [True, False])
def test_what_all_ranks_meet_is_told_by_those_that_report(capsys: pytest.CaptureFixture[str], reports: bool) -> None:
    told = "error: --tp is 3\n" if reports else ""
    assert ending(ConfigError("--tp is 3"), capsys, reports) == (EXIT_REFUSED, told)


def test_what_one_rank_meets_is_told_by_it(capsys: pytest.CaptureFixture[str]) -> None:
    error = CheckpointError("--save x: no space")
    error.failed_by(RANK_3)
    assert ending(error, capsys, reports=False) == (EXIT_FAILED, f"{RANK_3}: error: --save x: no space\n")


def test_what_another_rank_has_told_already_is_repeated_once_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    for reports in (True, False):
        error = CheckpointError("--save x: no space")
        error.failed_by(RANK_3)
        error.is_known = True
        assert bool(ending(error, capsys, reports)[1]) == reports


def test_the_exit_status_says_whether_a_run_had_started() -> None:
    assert (OutOfMemory("").exit_status, RankLost("").exit_status) == (EXIT_FAILED, EXIT_FAILED)
    for has_started, status in ((False, EXIT_REFUSED), (True, EXIT_FAILED)):
        error = CheckpointError("")
        error.failed_by(None, has_started)
        assert error.exit_status == status
    refused = ConfigError("")
    refused.failed_by(None, has_started=True)  # such as evaluate(iters=0)
    assert refused.exit_status == EXIT_REFUSED
    assert CheckpointError("").exit_status == EXIT_REFUSED  # the class is as it was


@pytest.mark.parametrize(
    ("environment", "is_first", "reports"),
    [
        ({}, True, True),
        ({"LOCAL_RANK": "0"}, True, True),
        ({"LOCAL_RANK": "1"}, False, True),  # started by hand, perhaps in a terminal of its own
        ({"LOCAL_RANK": "0", "TORCHELASTIC_RUN_ID": "x"}, True, True),
        ({"LOCAL_RANK": "1", "TORCHELASTIC_RUN_ID": "x"}, False, False),
    ],
)
def test_one_rank_of_each_node_reports_under_torchrun_and_each_that_was_started_by_hand(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], is_first: bool, reports: bool
) -> None:
    for name in ("LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert (is_first_of_node(), is_reporting_rank()) == (is_first, reports)


NAME, SHOWN = "a\x1b[2J\nerror: b\u202e", r"a\x1b[2J\nerror: b\u202e"


def test_what_is_told_and_warned_of_is_one_line_that_no_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    tell(f"waiting for {NAME}")
    assert capsys.readouterr().err == f"waiting for {SHOWN}\n"
    with pytest.warns(UserWarning) as warned:
        warn(f"{NAME} is not used")
    assert [str(each.message) for each in warned] == [f"{SHOWN} is not used"]


MAY_PRINT_ON_STANDARD_ERROR = {
    "memo/errors.py": "the functions that make names visible",
    "memo/cli/main.py": "help, and the one word interrupted",
    "memo/train/watchdog.py": "stacks, which have lines of their own",
}


def test_all_warnings_and_lines_on_standard_error_go_through_one_function() -> None:
    """So that none of them prints the name of a stranger's file as it is."""
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "memo").rglob("*.py") if prints_itself(path)}
    assert found == MAY_PRINT_ON_STANDARD_ERROR.keys()


def prints_itself(path: Path) -> bool:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            to = [ast.unparse(each.value) for each in node.keywords if each.arg == "file"]
            if "stderr" in " ".join(to) or ast.unparse(node.func) in ("warnings.warn", "sys.stderr.write"):
                return True
    return False

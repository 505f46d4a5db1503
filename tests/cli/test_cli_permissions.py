"""Files and folders of somebody else: one message with path and reason, never a wrong word or a traceback."""

from pathlib import Path

import pytest
from permissions import forbidden

from memo.cli.main import main


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("theirs", "theirs/iter_0000001", "theirs/hf", "texts"):
        Path(name).mkdir()
    for name in ("theirs/run_state.json", "theirs/hf/config.json", "theirs/d.idx", "theirs/d.bin", "texts/a.txt"):
        Path(name).write_text("{}")
    for name in ("theirs/tokenizer.json", "theirs/log.jsonl"):
        Path(name).write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "path"),
    [
        ("train --data-path theirs/d", "theirs/d"),
        ("train --mock-data --load theirs", "theirs/run_state.json"),
        ("export theirs --out out", "theirs/run_state.json"),
        ("import theirs/hf --out out", "theirs/hf"),
        ("plan --gpus 8 --model theirs/hf", "theirs/hf"),
        ("report theirs", "theirs/log.jsonl"),
        ("data build texts out --tokenizer theirs", "theirs/tokenizer.json"),
        ("data build theirs out", "theirs"),
        ("train --mock-data --config theirs/config.toml", "theirs/config.toml"),
    ],
)
def test_a_folder_of_another_user_is_no_missing_one(
    command: str, path: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with forbidden(folder / "theirs"), pytest.raises(SystemExit) as ended:
        main(command.split())
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert path in said and "Permission denied" in said and said.count("\n") == 1


def test_the_remedy_is_a_right_where_a_file_may_not_be_read(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with forbidden(folder / "texts" / "a.txt"), pytest.raises(SystemExit):
        main(["data", "build", "texts", "out"])
    said = capsys.readouterr().err
    assert "texts/a.txt: cannot be read (Permission denied): give the user who runs memo the right to it" in said

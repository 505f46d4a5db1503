"""Commands run in a folder of strangers, whose modules have the names of those that memo's processes import."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from memo.artifacts.python_process import python_command
from memo.data.encode import TextEncoder, encode_all
from memo.data.records import RecordPiece
from memo.data.tokenizer import ByteTokenizer

ROOT = Path(__file__).parents[2]
MODULES = ("json", "types", "numpy", "tokenizers", "torch")
MAY_NAME_THE_INTERPRETER = {"memo/artifacts/python_process.py"}
STARTS = {"subprocess.run", "subprocess.Popen", "os.execvpe"}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Whatever imports one of its modules makes the file `mark` there."""
    program = f"open({str(tmp_path / 'mark')!r}, 'w').close()\n"
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(program)
    (tmp_path / "memo").mkdir()
    (tmp_path / "memo" / "__init__.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_processes_that_tokenize_run_no_module_of_the_working_directory(folder: Path) -> None:
    piece = RecordPiece("a.jsonl", "line", [1], [b'{"text": "one"}'])
    ((_, (groups, _)),) = encode_all([piece], TextEncoder(ByteTokenizer(), "text", ()), 2)
    assert [ids.tolist() for ((ids, _),) in groups] == [list(b"one")]
    assert not (folder / "mark").exists()


def test_a_process_of_a_session_with_the_working_directory_on_its_path_has_it_not(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As notebooks and `python -c` have it."""
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    done = subprocess.run(python_command("import json, memo"), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not (folder / "mark").exists()


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def test_no_other_code_starts_python() -> None:
    """A new place that starts a process is looked at: what it runs, and where that finds its modules."""
    names = {
        str(path.relative_to(ROOT)): set(_names(ast.parse(path.read_text()))) for path in ROOT.glob("memo/**/*.py")
    }
    assert {file for file, found in names.items() if "sys.executable" in found} == MAY_NAME_THE_INTERPRETER
    assert {file for file, found in names.items() if found & STARTS} == {
        "memo/allocator/build.py",  # a compiler
        "memo/emulated_gpu/launch.py",  # the user's command
        "memo/emulated_gpu/symbols.py",  # readelf and nm
        "memo/rehearsal/start.py",
    }

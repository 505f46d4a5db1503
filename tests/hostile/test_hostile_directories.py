"""Directories of strangers that a run writes to: links, pipes and files under the names that memo uses."""

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainers import tiny_trainer

import memo
from memo.artifacts.regular_file import open_regular, replace_file
from memo.checkpoint.chunks import GlobalTensor
from memo.checkpoint.directory import LATEST, check_names
from memo.checkpoint.files import RUN_CONFIG
from memo.checkpoint.owner import OWNER, claim
from memo.checkpoint.run_state import RunState
from memo.checkpoint.store import write_tensors
from memo.errors import CheckpointError, MemoError

ROOT = Path(__file__).parents[2]
NAMES = (RUN_CONFIG, LATEST, OWNER, "log.jsonl", "log.run.json", "iter_0000002.partial")


def trainer(folder: Path, **overrides: Any) -> memo.Trainer:
    return tiny_trainer(**{"train_iters": 2, "save": str(folder), **overrides})


def link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "secret")


def dangling(path: Path) -> None:
    path.symlink_to(path.parent / "nothing")


KINDS = {
    "a link to .*secret": link,
    "a link to .*nothing": dangling,
    "a named pipe": os.mkfifo,
    "a directory": os.mkdir,
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_no_file_is_refused_by_name_before_the_first_step(tmp_path: Path, name: str, kind: str) -> None:
    if name.endswith(".partial") and kind == "a directory":
        return  # as a run that was killed leaves it
    (tmp_path / "secret").write_text("1")
    (tmp_path / "save").mkdir()
    KINDS[kind](tmp_path / "save" / name)
    # The pointer is read before.
    message = LATEST if name == LATEST and kind != "a link to .*nothing" else rf"--save .*: {name} is {kind}.*: remove"
    with pytest.raises(CheckpointError, match=message):
        trainer(tmp_path / "save")
    assert (tmp_path / "secret").read_text() == "1"
    assert [path.name for path in (tmp_path / "save").iterdir()] == [name]


def test_a_file_with_the_name_of_a_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "iter_0000002.partial").write_text("mine")
    with pytest.raises(CheckpointError, match=r"iter_0000002.partial is a file, but memo writes there under that name"):
        trainer(tmp_path)
    assert (tmp_path / "iter_0000002.partial").read_text() == "mine"


def test_what_appears_during_a_run_is_refused_by_name_at_its_save(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("1")
    with trainer(tmp_path / "save") as run:
        run.step()
        link(tmp_path / "save" / LATEST)
        with pytest.raises(CheckpointError) as caught:
            run.save()
    assert f"{LATEST} is a link to {tmp_path}/secret, but memo writes there" in str(caught.value)
    assert "disk space" not in str(caught.value)
    assert (tmp_path / "secret").read_text() == "1"


def test_a_checkpoint_that_is_a_link_is_replaced_and_its_target_stays(tmp_path: Path) -> None:
    def save(folder: Path, value: float) -> Path:
        return write_tensors(
            folder, RunState(1, 0, 0, 0, 0, 0), {"master/a": GlobalTensor.whole(torch.full((4,), value))}
        )

    theirs = save(tmp_path / "theirs", 1.0)
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "iter_0000001").symlink_to(theirs)
    for value in (2.0, 3.0):
        assert not save(tmp_path / "save", value).is_symlink()
    assert (theirs / "tensors-00000.bin").exists()
    assert sorted(path.name for path in (tmp_path / "save").iterdir()) == ["iter_0000001", LATEST]


def test_the_owner_of_a_directory_is_no_link_and_no_pipe(tmp_path: Path) -> None:
    for kind, make in KINDS.items():
        make(tmp_path / OWNER)
        with pytest.raises(CheckpointError, match=rf"{OWNER} is {kind}.*, but memo writes there under that name"):
            check_names(tmp_path, "--save")
        with pytest.raises(OSError, match=f"it is {kind}"):
            claim(tmp_path, print)
        (tmp_path / OWNER).rmdir() if kind == "a directory" else (tmp_path / OWNER).unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_is_not_written_through_what_is_none(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    KINDS[kind](folder / "a.json")
    (tmp_path / "secret").write_text("1")
    writes: list[Callable[[], object]] = [
        lambda: replace_file(folder / "a.json", "2"),
        lambda: open_regular(folder / "a.json", os.O_WRONLY | os.O_APPEND | os.O_CREAT),
    ]
    for write in writes:
        with pytest.raises(OSError, match=f"it is {kind}"):
            write()
    assert (tmp_path / "secret").read_text() == "1"
    assert [path.name for path in folder.iterdir()] == ["a.json"]


def test_a_fault_amid_writing_leaves_the_old_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from memo.config import RunConfig

    (tmp_path / RUN_CONFIG).write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / RUN_CONFIG, RunConfig().to_toml())
    assert (tmp_path / RUN_CONFIG).read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == [RUN_CONFIG]


WRITERS = {
    "write_text",
    "write_bytes",
    "NamedTemporaryFile",
    "mkstemp",
    "copyfile",
    "savefig",
    "save_file",
    "_dump_snapshot",
}
MAY_WRITE = {
    "memo/allocator/seal.py": "in a private folder",
    "memo/artifacts/build_lock.py": "a lock in a private folder, opened without following links",
    "memo/artifacts/regular_file.py": "what all others use",
    "memo/checkpoint/writer.py": "a new file in a directory that the save has made",
    "memo/data/indexed.py": "opened by open_regular",
    "memo/train/oom.py": "torch writes it, after open_regular has",
    "memo/train/metrics.py": "opened by open_regular",
    "memo/checkpoint/owner.py": "opened by open_regular",
    "memo/executor/record_file.py": "a file without a name",
    "memo/report/drawing.py": "into memory",
    "memo/emulated_gpu/build.py": "in a private folder",
    "memo/emulated_gpu/launch.py": "in a private or temporary folder",
}


def _writes(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    name = getattr(node.func, "attr", getattr(node.func, "id", ""))
    texts = [str(argument.value) for argument in node.args[:2] if isinstance(argument, ast.Constant)]
    modes = [text for text in texts if re.fullmatch("[rwaxbt+]{1,3}", text) and set(text) & set("wax+")]
    return name in WRITERS or (name in ("open", "fdopen") and bool(modes))


def test_no_other_code_creates_files() -> None:
    """A new place that writes is looked at: use memo.artifacts.regular_file.replace_file."""
    found = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("memo/**/*.py")
        if any(_writes(node) for node in ast.walk(ast.parse(path.read_text())))
    }
    assert found == MAY_WRITE.keys()


def test_an_export_deletes_nothing_that_it_has_not_made(tmp_path: Path) -> None:
    from memo.checkpoint.hugging_face.exporter import export_checkpoint

    with trainer(tmp_path / "save", train_iters=1) as run:
        run.train()
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("1")
    with pytest.raises(MemoError, match=r"out.partial is there already, of an export that was killed, or by another"):
        export_checkpoint(tmp_path / "save", tmp_path / "out")
    assert (tmp_path / "out.partial" / "mine").read_text() == "1"

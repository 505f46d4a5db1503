"""A directory of checkpoints survives a death at every single change that is made to it; which old ones are deleted."""

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memo.checkpoint.directory import (
    LATEST,
    latest_checkpoint,
    partial,
    prepare,
    publish,
    remove_older,
    whole_checkpoints,
)
from memo.checkpoint.run_state import RunState, read_state

TENSORS = "tensors-00000.bin"


def save(root: Path, iteration: int, content: str, keep_latest_k: int = 0, **state: Any) -> None:
    """What rank 0 does, with one small file for the tensors."""
    final = root / f"iter_{iteration:07d}"
    prepare(final)
    (partial(final) / TENSORS).write_text(content)
    publish(final, RunState(iteration, iteration, 7, iteration, 0, 0, 4, **state))
    remove_older(final, keep_latest_k)


def newest(root: Path) -> tuple[int, str]:
    """(iteration, content) as a load would find them, checked to be one whole checkpoint."""
    final = latest_checkpoint(root)
    return read_state(final).iteration, (final / TENSORS).read_text()


class Death(BaseException):
    """The process is gone: nothing after it runs."""


class Dies:
    """Counts what changes the disk durably, and ends the process before the n-th such call, or in the middle of it."""

    def __init__(self, patch: pytest.MonkeyPatch, after: int) -> None:
        self.left = after
        for module, name in ((os, "replace"), (os, "fsync"), (Path, "mkdir")):
            patch.setattr(module, name, self.counted(getattr(module, name)))
        patch.setattr(shutil, "rmtree", self.rmtree)
        self.remove = os.unlink

    def step(self) -> None:
        if self.left == 0:
            raise Death
        self.left -= 1

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            self.step()
            return call(*args, **kwargs)

        return wrapped

    def rmtree(self, path: Path, ignore_errors: bool = False) -> None:
        for file in sorted(path.iterdir()) if path.exists() else []:
            self.step()
            file.unlink()
        self.step()
        if path.exists():
            path.rmdir()


@pytest.mark.parametrize("again", [False, True], ids=["the next iteration", "the same iteration again"])
def test_a_death_at_any_moment_of_a_save_leaves_a_whole_newest_checkpoint(tmp_path: Path, again: bool) -> None:
    """Before the pointer moves the old one, after it the new one; and the next save finds nothing in its way."""
    iteration, found = (2 if again else 3), set()
    for after in range(1000):
        root = tmp_path / str(after)
        for number in (1, 2):
            save(root, number, f"first {number}")
        (root / "iter_0000009.partial").mkdir()  # an earlier run died as well
        with pytest.MonkeyPatch.context() as patch:
            dies = Dies(patch, after)
            try:
                save(root, iteration, "second", keep_latest_k=1)
                died = False
            except Death:
                died = True
        assert newest(root) in ((2, "first 2"), (iteration, "second"))
        found.add(newest(root))
        for path in whole_checkpoints(root):
            assert (path / TENSORS).exists(), f"{path} is deleted in part and has the name of a whole one"
        save(root, iteration + 1, "third", keep_latest_k=1)
        assert newest(root) == (iteration + 1, "third")
        assert sorted(path.name for path in root.iterdir()) == [f"iter_{iteration + 1:07d}", LATEST]
        if not died:
            assert dies.left == 0 and after > 10  # there were that many moments
            assert found == {(2, "first 2"), (iteration, "second")}
            return
    raise AssertionError("it never came to an end")


def test_a_second_death_at_any_moment_after_one_between_the_two_renames(tmp_path: Path) -> None:
    """The pointer names an iteration that is only there as the one to be replaced; then the next save dies, too."""
    for after in range(1000):
        root = tmp_path / str(after)
        save(root, 2, "first")
        os.replace(root / "iter_0000002", root / "iter_0000002.replaced")
        with pytest.MonkeyPatch.context() as patch:
            Dies(patch, after)
            try:
                save(root, 3, "second")
                return
            except Death:
                assert newest(root) in ((2, "first"), (3, "second"))
    raise AssertionError("it never came to an end")


def test_every_name_is_on_the_disk_before_what_counts_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint's folder before it gets its final name, that name before the pointer, and then the pointer's."""
    final, done = tmp_path / "iter_0000001", []
    fsync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        fsync(descriptor)
        same = [p for p in (tmp_path, *tmp_path.rglob("*")) if os.path.samestat(p.stat(), os.fstat(descriptor))]
        done.append(re.sub(r"\.[0-9a-f]{8}\.partial", ".new", same[0].name))

    def renamed(source: Path, target: Path) -> None:
        replace(source, target)
        done.append(f"now {target.name}")

    prepare(final)
    (partial(final) / TENSORS).write_text("")
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    publish(final, RunState(1, 1, 7, 1, 0, 0, 4))
    assert done == [
        "run_state.json.new",
        "now run_state.json",
        "iter_0000001.partial",
        "now iter_0000001",
        tmp_path.name,
        f"{LATEST}.new",
        f"now {LATEST}",
        tmp_path.name,
    ]


@pytest.mark.parametrize(("keep", "left"), [(0, [10, 20, 30, 40]), (1, [40]), (2, [30, 40]), (9, [10, 20, 30, 40])])
def test_the_newest_k_stay(tmp_path: Path, keep: int, left: list[int]) -> None:
    for iteration in (10, 20, 30, 40):
        save(tmp_path, iteration, "", keep)
    assert whole_checkpoints(tmp_path) == [tmp_path / f"iter_{iteration:07d}" for iteration in left]
    assert newest(tmp_path)[0] == 40


def test_where_all_stay_the_older_ones_that_time_has_asked_for_go(tmp_path: Path) -> None:
    """While steps are skipped, the last one from before the first skip stays in any case."""
    for iteration, by_time, skips in ((10, False, 0), (20, True, 0), (30, True, 0), (40, False, 3), (50, True, 13)):
        save(tmp_path, iteration, "", by_time=by_time, consecutive_skips=skips)
    assert [read_state(path).iteration for path in whole_checkpoints(tmp_path)] == [10, 30, 40, 50]
    save(tmp_path, 60, "")
    assert [read_state(path).iteration for path in whole_checkpoints(tmp_path)] == [10, 40, 60]


def test_old_means_an_older_iteration_whatever_the_number_of_digits(tmp_path: Path) -> None:
    for iteration in (9_999_999, 10_000_000, 10_000_001):
        save(tmp_path, iteration, "", keep_latest_k=2)
    assert [path.name for path in whole_checkpoints(tmp_path)] == ["iter_10000000", "iter_10000001"]


def test_only_whole_older_checkpoints_of_this_directory_are_deleted(tmp_path: Path) -> None:
    elsewhere, root = tmp_path / "elsewhere", tmp_path / "root"
    save(elsewhere, 1, "somebody else's")
    save(root, 90, "of a run that went back")
    save(root, 2, "first")
    (root / "iter_0000001").symlink_to(elsewhere / "iter_0000001")
    for name in ("iter_0000000", "iter_best", "hugging_face"):
        (root / name).mkdir()
    save(root, 3, "second", keep_latest_k=1)
    assert newest(elsewhere) == (1, "somebody else's")
    kept = ["hugging_face", "iter_0000000", "iter_0000001", "iter_0000003", "iter_0000090", "iter_best", LATEST]
    assert sorted(path.name for path in root.iterdir()) == kept
    assert newest(root) == (3, "second")


def test_nothing_is_deleted_before_the_newer_one_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, "first")
    rmtree, seen = shutil.rmtree, []

    def looked_at(path: Path, **kwargs: bool) -> None:
        if path.name.startswith("iter_0000001"):
            seen.append(newest(tmp_path))
        rmtree(path, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", looked_at)
    save(tmp_path, 2, "second", keep_latest_k=1)
    assert seen == [(2, "second")]

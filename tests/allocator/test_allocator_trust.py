"""Whose library is loaded: one that this user built, whole, in a folder that nobody else can write. Or it is built."""

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import alone

from memo.allocator import build
from memo.allocator.seal import seal, seal_fault
from memo.artifacts import cache_folder as cache_folder_module
from memo.artifacts.cache_folder import cache_folder, folder_fault, make_private
from memo.errors import AllocatorError

KEY = "0123456789abcdef01234567"
REMEDY = "; or set XDG_CACHE_HOME to a folder of your own"


@pytest.fixture
def reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every user could reach the test's folders: pytest makes them in one that is closed to others."""
    monkeypatch.setattr(cache_folder_module, "_ENTERED_BY_OTHERS", stat.S_IXUSR)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memo" / "allocator"


def build_into(target: Path) -> None:
    """As a compiler would."""
    build.compile_sealed(lambda output: ["sh", "-c", f"echo ours > {output}"], target, KEY)


def kept() -> Path:
    return build.kept_library("x", KEY, build_into)


def test_what_is_built_is_this_users_alone_and_found_again(folder: Path) -> None:
    before = os.umask(0)
    try:
        target = kept()
    finally:
        os.umask(before)
    assert target == folder / f"x-{KEY}.so" and target.read_bytes().startswith(b"ours\n")
    for path in (target, folder, folder.parent, folder.parent.parent):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    assert seal_fault(target, KEY) is None
    first = target.stat().st_ino
    assert kept().stat().st_ino == first


def foreign(target: Path) -> None:
    target.write_bytes(b"theirs")
    seal(target, KEY)


def writable(target: Path) -> None:
    foreign(target)
    target.chmod(0o777)


def linked(target: Path) -> None:
    foreign(target.with_suffix(".elsewhere"))
    target.symlink_to(target.with_suffix(".elsewhere"))


def cut_short(target: Path) -> None:
    build_into(target)
    os.truncate(target, target.stat().st_size - 20)


def emptied(target: Path) -> None:
    target.touch(mode=0o700)


def flipped(target: Path) -> None:
    build_into(target)
    content = bytearray(target.read_bytes())
    content[1] ^= 1
    target.write_bytes(content)


def of_another_key(target: Path) -> None:
    target.write_bytes(b"theirs")
    seal(target, KEY[::-1])


@pytest.mark.parametrize(
    ("prepare", "told"),
    [
        (writable, r"other users can write it \(mode 777\)"),
        (linked, "it is no regular file"),
        (cut_short, "it is not as it was built: damaged, or cut short"),
        (emptied, "it is not as it was built"),
        (flipped, "it is not as it was built"),
        (of_another_key, "it was built for another torch or from other sources"),
    ],
)
def test_another_file_is_not_loaded_but_built_again(folder: Path, prepare: Callable[[Path], None], told: str) -> None:
    make_private(folder)
    prepare(folder / f"x-{KEY}.so")
    with pytest.warns(UserWarning, match=rf"x-{KEY}.so is not loaded but built again: {told}"):
        target = kept()
    assert target.read_bytes().startswith(b"ours\n") and not target.is_symlink()
    assert stat.S_IMODE(target.stat().st_mode) == 0o700


def of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    return r"belongs to user \d+, not to user 4321, who runs memo"


def writable_by_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path.chmod(0o777)
    return rf"{path} can be written by other users \(mode 777\): chmod go-w {path}"


def writable_by_the_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path.parents[1].chmod(0o770)
    return rf"{path.parents[1]} can be written by other users \(mode 770\)"


def sticky_and_writable(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Others cannot exchange files there, but they can add some."""
    path.chmod(0o1777)
    return rf"{path} can be written by other users \(mode 1777\)"


def a_link(path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")
    return rf"{path} is a link: replace it with a folder"


@pytest.mark.usefixtures("reachable")
@pytest.mark.parametrize(
    "spoil", [of_another_user, writable_by_all, writable_by_the_group, sticky_and_writable, a_link]
)
def test_a_folder_that_others_can_change_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, spoil: Callable[[Path, pytest.MonkeyPatch], str]
) -> None:
    make_private(folder)
    foreign(folder / f"x-{KEY}.so")
    told = spoil(folder, monkeypatch)
    with pytest.raises(AllocatorError, match=rf"kept in {folder}, where others could exchange it: .*{told}.*{REMEDY}"):
        kept()
    with pytest.raises(AllocatorError, match="where others could exchange it"):
        build.library("cpu")


def test_a_sticky_folder_above_is_as_good_as_tmp(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    make_private(tmp_path / "open" / "mine")
    assert folder_fault(tmp_path / "open" / "mine") is None


def test_what_only_this_user_can_reach_may_be_writable_by_its_group(tmp_path: Path) -> None:
    """As below a closed home directory, where folders made under umask 002 are."""
    folder = tmp_path / "home" / ".cache" / "memo"
    make_private(folder)
    folder.chmod(0o775)
    folder.parent.chmod(0o775)
    assert folder_fault(folder) is None


@pytest.mark.usefixtures("reachable")
def test_the_way_behind_a_link_is_checked_too(tmp_path: Path) -> None:
    make_private(tmp_path / "open" / "inner" / "allocator")
    (tmp_path / "open").chmod(0o777)
    (tmp_path / "way").symlink_to(tmp_path / "open" / "inner")
    told = folder_fault(tmp_path / "way" / "allocator")
    assert told is not None and told.startswith(f"{tmp_path}/open can be written by other users (mode 777)")


def test_a_relative_path_is_ignored_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever chooses the working directory chooses the library."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    make_private(tmp_path / "cache" / "memo" / "allocator")
    foreign(tmp_path / "cache" / "memo" / "allocator" / f"x-{KEY}.so")
    with pytest.warns(UserWarning, match=r"^XDG_CACHE_HOME is 'cache', a relative path, which is ignored"):
        target = kept()
    assert target == tmp_path / "home" / ".cache" / "memo" / "allocator" / f"x-{KEY}.so"
    assert target.read_bytes().startswith(b"ours\n")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "home")
    with pytest.raises(RuntimeError, match="is a relative path"):
        cache_folder("allocator")
    with pytest.raises(AllocatorError, match="set XDG_CACHE_HOME"):
        kept()


@pytest.fixture
def library() -> Path:
    """The real one, of the cache of all tests."""
    return build.library("cpu")


def test_a_library_that_was_cut_short_does_not_end_the_process(
    library: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading its first half is a SIGBUS. What builds it again is a compiler that has the result already."""
    compiler = tmp_path / "c++"
    compiler.write_text(f'#!/bin/sh\nwhile [ "$1" != "-o" ]; do shift; done; cp {library} $2\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    make_private(folder)
    whole = Path(shutil.copy(library, folder))
    assert build.library("cpu") == whole
    os.truncate(whole, whole.stat().st_size // 2)
    program = "from memo.allocator.planned import *; PlannedAllocator.install('cpu')"
    with alone(tmp_path, ("program", program), []) as process:
        done = process.ended(0)
    assert done.status == 0, done.errors
    assert "is not loaded but built again: it is not as it was built: damaged, or cut short" in done.errors
    assert seal_fault(whole, build.build_key("cpu")) is None

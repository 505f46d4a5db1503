"""Compiler, headers and sources of native code: found in the order that is promised, else one message."""

from pathlib import Path

import pytest

from memo.artifacts import toolchain
from memo.errors import AllocatorError, EmulatorError, MemoError

USERS = [("the native allocator", AllocatorError), ("the emulated GPU", EmulatorError)]


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty one: nothing on the path, nothing named by the environment, no toolkit."""
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    is_there = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.is_relative_to(tmp_path) and is_there(path))
    return tmp_path


def program(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return path


def headers(folder: Path, *names: str) -> Path:
    for name in names or toolchain.NEEDED_HEADERS:
        program(folder / name)
    return folder


@pytest.mark.parametrize(("user", "error"), USERS)
def test_what_is_missing_is_told(machine: Path, user: str, error: type[MemoError]) -> None:
    with pytest.raises(error, match=rf"^there is no C\+\+ compiler for {user}: install g\+\+ or set CXX$"):
        toolchain.find_compiler(user, error)
    with pytest.raises(error, match=rf"^there is no folder with cuda_runtime_api.h, .* for {user}: install CUDA's "):
        toolchain.cuda_include(machine / "site-packages" / "torch", user, error)
    with pytest.raises(error, match=rf"^the sources of {user} are not in .*/memo/x/csrc: install memo again$"):
        toolchain.source_root(machine / "memo" / "x", "core", user, error)


def test_a_compiler_that_is_named_comes_first(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(machine / "bin" / "g++")
    assert toolchain.find_compiler(*USERS[0]) == str(machine / "bin" / "g++")
    program(machine / "bin" / "mine")
    monkeypatch.setenv("CXX", "mine")
    assert toolchain.find_compiler(*USERS[0]) == str(machine / "bin" / "mine")


def test_headers_of_a_named_toolkit_of_the_compilers_and_of_packages_beside_torch(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = machine / "site-packages" / "torch"
    packages = headers(machine / "site-packages" / "nvidia" / "cu13" / "include")
    assert toolchain.cuda_include(torch, *USERS[0]) == packages
    program(machine / "toolkit" / "bin" / "nvcc")
    beside_nvcc = headers(machine / "toolkit" / "include", "cuda_runtime_api.h")
    monkeypatch.setenv("PATH", str(machine / "toolkit" / "bin"))
    assert toolchain.cuda_include(torch, *USERS[0]) == packages  # the toolkit's are not whole
    headers(beside_nvcc)
    assert toolchain.cuda_include(torch, *USERS[0]) == beside_nvcc
    named = headers(machine / "named" / "include")
    monkeypatch.setenv("CUDA_HOME", str(machine / "named"))
    assert toolchain.cuda_include(torch, *USERS[0]) == named


def test_sources_that_were_packed_come_before_those_of_a_checkout(machine: Path) -> None:
    package = machine / "memo" / "x"
    (machine / "csrc" / "core").mkdir(parents=True)
    assert toolchain.source_root(package, "core", *USERS[0]) == machine / "csrc"
    (package / "csrc" / "core").mkdir(parents=True)
    assert toolchain.source_root(package, "core", *USERS[0]) == package / "csrc"

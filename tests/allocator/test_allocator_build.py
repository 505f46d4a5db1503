"""Building on first use: once for all ranks, found again, built ahead, and refused with a reason."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from memo.allocator import build
from memo.allocator.library import NativeLibrary
from memo.allocator.planned import PlannedAllocator
from memo.allocator.seal import seal, seal_fault
from memo.errors import AllocatorError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "memo" / "allocator"


def _fake_compiler(folder: Path, script: str) -> str:
    """For $CXX; the script finds the output file in $OUTPUT."""
    path = folder / "fake-cxx"
    search = 'while [ "$1" != "-o" ]; do shift; done; OUTPUT=$2'
    path.write_text(f"#!/bin/sh\n{search}\n{script}\n")
    path.chmod(0o755)
    return str(path)


def _build_on_rank(cache: str, compiler: str) -> str:
    os.environ.update(XDG_CACHE_HOME=cache, CXX=compiler)  # of this rank's own process
    dist.barrier()
    return str(build.library("cpu"))


def test_ranks_build_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    compiler = _fake_compiler(tmp_path, f"echo >> {calls}; sleep 0.3; echo built > $OUTPUT")
    paths = run_ranks(3, _build_on_rank, str(tmp_path), compiler)
    assert set(paths) == {str(tmp_path / "memo" / "allocator" / f"cpu-{build.build_key('cpu')}.so")}
    assert calls.read_text() == "\n"
    assert sorted(path.suffix for path in Path(paths[0]).parent.iterdir()) == [".lock", ".so"]


def test_key_changes_with_torch_and_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = {build.build_key("cpu"), build.build_key("cuda")}
    copied = tmp_path / "csrc"
    shutil.copytree(build.source_root(), copied)
    monkeypatch.setattr(build, "source_root", lambda: copied)
    assert build.build_key("cpu") in keys
    (copied / "core" / "plan.h").write_text("other")
    keys.add(build.build_key("cpu"))
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    keys.add(build.build_key("cpu"))
    assert len(keys) == 4


def test_library_built_ahead_is_used_where_its_key_fits(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, "echo fresh > $OUTPUT"))
    sources = build.source_root()
    monkeypatch.setattr(build, "source_root", lambda: sources)
    monkeypatch.setattr(build, "PACKAGE", tmp_path)
    ahead = tmp_path / "_planned_cpu.abi.so"
    ahead.write_bytes(b"...of another torch...")
    seal(ahead, "0" * 24)
    assert build.library("cpu").read_bytes().startswith(b"fresh\n")
    ahead.write_bytes(b"...of this one...")
    seal(ahead, build.build_key("cpu"))
    assert build.library("cpu") == ahead
    ahead.write_bytes(ahead.read_bytes()[:-1])
    assert build.library("cpu") != ahead


def test_real_library_carries_its_key() -> None:
    content = build.library("cpu").read_bytes()
    assert content.count(build.build_key("cpu").encode()) == 2  # in its code, and in its seal
    assert content.startswith(b"\x7fELF")


def test_failed_build_tells_what_the_compiler_said(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "echo 'x.h:1: error: no such thing' >&2; echo half > $OUTPUT; exit 1"
    compiler = _fake_compiler(tmp_path, script)
    monkeypatch.setenv("CXX", compiler)
    said = f"{compiler} cannot build the native allocator for torch {torch.__version__}:\nx.h:1: error: no such thing"
    with pytest.raises(AllocatorError) as info:
        build.library("cpu")
    assert str(info.value) == said
    assert [path.suffix for path in empty_cache.iterdir()] == [".lock"]


def test_no_compiler(empty_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(AllocatorError, match=r"^there is no C\+\+ compiler .*: install g\+\+ or set CXX$"):
        build.library("cpu")


def test_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(
        AllocatorError, match=r"cannot be kept in .*: set XDG_CACHE_HOME to a folder that can be written"
    ):
        build.library("cpu")


def test_missing_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "memo" / "allocator")
    with pytest.raises(AllocatorError, match=r"sources of the native allocator are not in .*: install memo again"):
        build.source_root()


def test_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    (tmp_path / "x.so").write_text("no library")
    with pytest.raises(AllocatorError, match=r"cannot be loaded \(.*x.so.*\): delete .*x.so, then it is built again"):
        NativeLibrary(tmp_path / "x.so")


@pytest.mark.parametrize("device", ["tpu", "cuda"])
def test_device_without_allocator(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = {"tpu": r"device = 'tpu' has no planned allocator: give one of \('cpu', 'cuda'\)"}
    with pytest.raises(AllocatorError, match=told.get(device, "torch finds no CUDA device: give 'cpu'")):
        PlannedAllocator.install(device)  # type: ignore[arg-type]


def _checkout(folder: Path) -> Path:
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("memo", "kernels", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return folder


def test_wheel_holds_the_sources_and_installs_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, "exit 1"))
    folder = _checkout(tmp_path)
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "bdist_wheel"], check=False, cwd=folder, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "memo is installed without its cpu allocator" in done.stdout + done.stderr
    names = set(zipfile.ZipFile(next((folder / "dist").glob("*.whl"))).namelist())
    packed = {name for name in names if name.startswith("memo/allocator/csrc/")}
    emulator = {path.relative_to(ROOT) for path in (ROOT / "csrc" / "emulated_gpu").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("memo/emulated_gpu/csrc/")} == {
        f"memo/emulated_gpu/{path}" for path in emulator
    }
    core = {f"memo/allocator/csrc/core/{path.name}" for path in (ROOT / "csrc" / "core").iterdir()}
    assert packed == core | {f"memo/allocator/csrc/{binding}" for binding in build.BINDINGS.values()} | {
        "memo/allocator/csrc/cuda/delegating_allocator.h"
    }
    assert "memo/allocator/build.py" in names
    assert not any(name.endswith(".so") for name in names)


def test_build_ext_builds_into_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", _fake_compiler(tmp_path, "echo ahead > $OUTPUT"))
    folder = _checkout(tmp_path)
    subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=folder, check=True, capture_output=True
    )
    built = list((folder / "memo" / "allocator").glob(f"{build.extension_name('cpu')}*.so"))
    assert [path.read_bytes()[:6] for path in built] == [b"ahead\n"]
    assert seal_fault(built[0], build.build_key("cpu")) is None

"""What the emulated GPU is built of, as far as no CUDA build of torch is needed to tell."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from memo.artifacts import cache_folder, toolchain
from memo.emulated_gpu import build, symbols
from memo.emulated_gpu.__main__ import main
from memo.emulated_gpu.launch import is_emulated
from memo.errors import EXIT_REFUSED, EmulatorError

HEADERS_ARE_ENOUGH = """
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <c10/cuda/CUDAStream.h>
"""

COMMAND = ["--", "python", "-c", "pass"]


@pytest.fixture
def torch_of_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch = tmp_path / "torch"
    (torch / "lib").mkdir(parents=True)
    (torch / "version.py").write_text("__version__ = '2.13.0+cpu'\n")
    spec = ModuleSpec("torch", None, origin=str(torch / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.delenv("EMULATED_GPU_LIBRARIES", raising=False)
    return torch


def refusal(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as info:
        main(COMMAND)
    assert info.value.code == EXIT_REFUSED
    return capsys.readouterr().err


def test_torch_without_cuda_is_refused(torch_of_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys) == (
        "error: the emulated GPU needs a CUDA build of torch, and 2.13.0+cpu is none: "
        'pip install --no-deps "torch===2.13.0" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*" gets it on '
        "Linux; without the libraries of a GPU it works on the emulated one alone, so give it an environment of its "
        "own\n"
    )


def test_torch_of_another_cuda_is_refused(torch_of_cpu: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (torch_of_cpu / "lib" / "libtorch_cuda.so").touch()
    (torch_of_cpu / "version.py").write_text("__version__ = '2.13.0+cu126'\ncuda: Optional[str] = '12.6'\n")
    assert refusal(capsys).startswith(
        "error: the emulated GPU stands for CUDA 13, and 2.13.0+cu126 is built for CUDA 12: pip install --no-deps "
    )


def test_no_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch, torch_of_cpu: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert refusal(capsys).startswith("error: the emulated GPU needs a CUDA build of torch, and there is no torch: ")


def test_a_folder_that_others_can_write_is_refused(
    torch_of_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (torch_of_cpu / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(cache_folder, "folder_fault", lambda folder: f"{folder} can be written by others")
    assert "where others could exchange it: " in refusal(capsys)


def test_a_folder_that_cannot_be_made_is_refused(
    torch_of_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (torch_of_cpu / "lib" / "libtorch_cuda.so").touch()
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "set XDG_CACHE_HOME to a folder that can be written" in refusal(capsys)


def test_another_torch_or_other_sources_have_another_key(
    torch_of_cpu: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {build.build_key(torch_of_cpu)}
    (torch_of_cpu / "version.py").write_text("__version__ = '2.14.1'\n")
    keys.add(build.build_key(torch_of_cpu))
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(build, "source_root", lambda: tmp_path / "sources")
    keys.add(build.build_key(torch_of_cpu))
    assert len(keys) == 3


def test_sources_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (build.source_root() / "runtime" / "scheduler.cpp").is_file()
    monkeypatch.setattr(build, "PACKAGE", tmp_path / "memo" / "emulated_gpu")
    with pytest.raises(EmulatorError, match=r"the sources of the emulated GPU are not in .*: install memo again"):
        build.source_root()


@pytest.mark.skipif(not is_emulated(), reason="the packages with CUDA's headers are installed by `make emulated` alone")
def test_headers_of_packages_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a toolkit."""
    monkeypatch.setattr(toolchain.shutil, "which", lambda name: None)
    torch = build.find_torch()
    folders = list(torch.parent.glob("nvidia/*/include"))
    monkeypatch.setattr(toolchain, "TOOLKIT", tmp_path)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    found = build.cuda_include()
    assert found in folders
    monkeypatch.undo()
    program = tmp_path / "program.cpp"
    program.write_text(HEADERS_ARE_ENOUGH)
    driver = build.source_root() / "runtime" / "driver.cpp"
    for source in (program, driver):
        symbols.output_of(
            toolchain.find_compiler(build.WHAT, EmulatorError),
            *("-std=c++20", "-fsyntax-only", f"-I{found}", f"-I{torch / 'include'}", str(source)),
        )

"""Finds the compiler, headers and sources with which memo's native code is built on first use. No torch.

The planned allocator and the emulated GPU use it. `user` names the library in messages, and `error` is the class of
error to raise if something is missing.
"""

import os
import shutil
from pathlib import Path

from memo.errors import MemoError

NEEDED_HEADERS = ("cuda_runtime_api.h", "cuda.h", "crt/host_defines.h")
"""Headers that one folder must have; some of CUDA's packages on PyPI spread them over several folders."""

TOOLKIT = Path("/usr/local/cuda")
"""The default folder of CUDA's toolkit."""


def find_compiler(user: str, error: type[MemoError]) -> str:
    """The path of a C++ compiler: $CXX, or the first of c++, g++ and clang++. Raises `error` if there is none."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return found
    raise error(f"there is no C++ compiler for {user}: install g++ or set CXX")


def cuda_include(torch: Path, user: str, error: type[MemoError]) -> Path:
    """The folder of CUDA's headers, in the toolkit or in CUDA's packages from PyPI next to torch.

    Raises `error` if there is none.
    """
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), nvcc and Path(nvcc).resolve().parents[1]]
    folders = [Path(home) / "include" for home in [*homes, TOOLKIT] if home]
    folders += sorted(torch.parent.glob("nvidia/*/include"))
    for folder in folders:
        if all((folder / name).exists() for name in NEEDED_HEADERS):
            return folder
    raise error(
        f"there is no folder with {', '.join(NEEDED_HEADERS)} for {user}: install CUDA's headers, for one with "
        "pip install nvidia-cuda-runtime nvidia-cuda-crt, or set CUDA_HOME to a toolkit"
    )


def source_root(package: Path, part: str, user: str, error: type[MemoError]) -> Path:
    """The folder csrc/ with `part`: in the folder of `package` if memo is installed, else at the top of a checkout.

    Raises `error` if there is none.
    """
    for root in (package / "csrc", package.parents[1] / "csrc"):
        if (root / part).is_dir():
            return root
    raise error(f"the sources of {user} are not in {package / 'csrc'}: install memo again")

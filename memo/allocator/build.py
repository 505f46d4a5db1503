"""Build the native allocator against the running torch: once, into the user's cache folder.

A library works only with the torch it was built against, because torch's allocator classes change between versions.
So its name contains a key over everything that it depends on; a different torch or csrc/ has a different key.
`python setup.py build_ext --inplace` builds ahead, beside this file; that library is used first if its key fits.

Anyone who can write a library that memo loads can act as its user. So only the user may have access to the cache
folder, and the file must be whole and sealed with its key (seal.py); otherwise it is not loaded but built again.
"""

import contextlib
import hashlib
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

import torch

from memo.allocator.seal import seal, seal_fault
from memo.artifacts import toolchain
from memo.artifacts.build_lock import build_lock
from memo.artifacts.cache_folder import file_fault, private_folder
from memo.artifacts.regular_file import make_durable
from memo.errors import AllocatorError, warn

Device = Literal["cpu", "cuda"]
DEVICES: tuple[Device, ...] = get_args(Device)

PACKAGE = Path(__file__).parent
WHAT = "the native allocator"
FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden")
BINDINGS: dict[Device, str] = {"cpu": "torch/cpu_allocator.cpp", "cuda": "cuda/cuda_allocator.cpp"}
LIBRARIES: dict[Device, tuple[str, ...]] = {"cpu": ("-lc10",), "cuda": ("-lc10", "-lc10_cuda")}
COMPILE_TIMEOUT_S = 600
NUM_SHOWN_LINES = 5
CACHE = "allocator"
"""Name of the folder in memo's cache."""


def library(device: Device) -> Path:
    """Return the shared library for the running torch; builds it, which takes seconds, if there is none yet.

    All ranks may call this at once: one rank of each node builds, and the others wait. Raises AllocatorError.
    """
    key = build_key(device)
    for ahead in PACKAGE.glob(f"{extension_name(device)}*.so"):
        with contextlib.suppress(OSError):
            if seal_fault(ahead.resolve(), key) is None:  # it is as trusted as the code beside it
                return ahead
    return kept_library(device, key, lambda target: compile_library(device, target))


def kept_library(name: str, key: str, compile_into: Callable[[Path], None]) -> Path:
    """Return NAME-KEY.so in the cache folder; builds it if there is none that may be loaded. Raises AllocatorError."""
    folder = private_folder(CACHE, WHAT, AllocatorError)
    target = folder / f"{name}-{key}.so"
    try:
        if not _may_be_loaded(target, key, warns=False):
            with build_lock(target.with_suffix(".lock"), WHAT, works_without=True):  # else the last one stays
                if not _may_be_loaded(target, key, warns=True):
                    compile_into(target)
    except OSError as error:
        raise AllocatorError(
            f"the native allocator cannot be kept in {folder} ({error.strerror or error}): "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from None
    return target


def _may_be_loaded(target: Path, key: str, *, warns: bool) -> bool:
    try:
        fault = file_fault(target) or seal_fault(target, key)
    except FileNotFoundError:
        return False
    if fault and warns:
        warn(f"{target} is not loaded but built again: {fault}")
    return fault is None


def extension_name(device: Device) -> str:
    """The name of the library that is built ahead, without the suffix."""
    return f"_planned_{device}"


def build_key(device: Device) -> str:
    """A hash of all that the library depends on: torch with its CUDA and C++ ABI, machine, C library, csrc/ and flags.

    The compiler is left out, so that a library that was built ahead works on a machine without a compiler.
    """
    facts = [torch.__version__, str(torch.compiled_with_cxx11_abi()), platform.machine(), *platform.libc_ver(), *FLAGS]
    digest = hashlib.sha256("\n".join(facts).encode())
    root = source_root()
    for path in sorted(p for folder in ("core", Path(BINDINGS[device]).parent) for p in (root / folder).iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def source_root() -> Path:
    """The folder csrc/. Raises AllocatorError."""
    return toolchain.source_root(PACKAGE, "core", WHAT, AllocatorError)


def compile_library(device: Device, target: Path) -> None:
    """Compile the allocator for the running torch; see `compile_sealed`."""
    compiler = find_compiler()
    compile_sealed(lambda output: command(device, compiler, output), target, build_key(device))


def compile_sealed(command_for: Callable[[Path], list[str]], target: Path, key: str) -> None:
    """Write `target` whole or not at all, even if the machine stops, with the seal of `key`.

    Raises AllocatorError with the compiler's message, and OSError for the folder.
    """
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
        partial = Path(folder) / target.name
        compiled = command_for(partial)
        try:
            done = subprocess.run(compiled, check=False, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise AllocatorError(
                f"{compiled[0]} did not build the native allocator within {COMPILE_TIMEOUT_S} s: try again"
            ) from None
        if done.returncode != 0:
            errors = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
            told = "\n".join(errors[:NUM_SHOWN_LINES])
            raise AllocatorError(
                f"{compiled[0]} cannot build the native allocator for torch {torch.__version__}:\n{told}"
            )
        seal(partial, key)
        partial.replace(target)
        make_durable(target.parent)


def command(device: Device, compiler: str, output: Path, *extra_flags: str) -> list[str]:
    """The command that compiles and links the library in one step."""
    root, home = source_root(), Path(torch.__file__).parent
    includes = [home / "include", *([cuda_include()] if device == "cuda" else [])]
    sources = [*sorted((root / "core").glob("*.cpp")), root / BINDINGS[device]]
    return [
        *(compiler, *FLAGS, *extra_flags),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        f'-DMEMO_BUILD_KEY="{build_key(device)}"',
        *(f"-I{include}" for include in includes),
        *map(str, sources),
        *("-o", str(output), f"-L{home / 'lib'}", *LIBRARIES[device]),
    ]


def find_compiler() -> str:
    """The C++ compiler. Raises AllocatorError."""
    return toolchain.find_compiler(WHAT, AllocatorError)


def cuda_include() -> Path:
    """The folder of cuda_runtime_api.h. Raises AllocatorError."""
    return toolchain.cuda_include(Path(torch.__file__).parent, WHAT, AllocatorError)

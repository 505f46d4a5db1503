"""Builds the libraries that replace CUDA's, once for each version of torch, in the user's cache folder.

torch's own folder is not changed: a process that `launch` starts loads the libraries of the cache folder first.
"""

import hashlib
import importlib.util
import os
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from memo.artifacts import toolchain
from memo.artifacts.build_lock import build_lock
from memo.artifacts.cache_folder import private_folder
from memo.emulated_gpu import symbols
from memo.errors import EmulatorError

PACKAGE = Path(__file__).parent
WHAT = "the emulated GPU"
CUDA_MAJOR = 13
RUNTIME = f"libcudart.so.{CUDA_MAJOR}"
NCCL = "libnccl.so.2"
SOURCES = {
    RUNTIME: "runtime/*.cpp",
    NCCL: "collectives/*.cpp",
    "libcublasLt.so.13": "libraries/cublas_lt.cpp",
    "libcublas.so.13": "libraries/cublas.cpp",
    "libcudnn.so.9": "libraries/cudnn.cpp",
    "libnvidia-ml.so.1": "libraries/nvml.cpp",
}
"""The sources of each library; all other symbols that torch needs are stubs."""

OPERATORS = "libemulated_operators.so"
FLAGS = ("-std=c++17", "-O2", "-g1", "-fPIC", "-fvisibility=hidden", "-Wall")
LIBRARY_FLAGS = ("-fvisibility=default",)
TORCH_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-DNDEBUG", "-fvisibility=hidden", "-Wall", "-Wno-deprecated-declarations")
"""With NDEBUG, like torch itself: without it, some of torch's classes have additional fields."""

EXPORTED = "cu*; __cuda*; emulated_*; nccl*; nv*;"

ERROR_NOT_SUPPORTED = 801
"""cudaErrorNotSupported and CUDA_ERROR_NOT_SUPPORTED."""

ENTRY_POINT = "[torch.backends]\nmemo_emulated_gpu = memo.emulated_gpu.face:autoload\n"


def libraries() -> Path:
    """Return the folder with all libraries; builds them first if they do not exist, in a minute or two.

    Several processes may call this at once. Raises EmulatorError.
    """
    torch = find_torch()
    folder = cache_folder() / build_key(torch)
    folder.mkdir(exist_ok=True)
    complete = folder / "complete"
    if complete.exists():  # without the lock, which another process may hold while it builds other libraries
        return folder
    with build_lock(cache_folder() / "lock", WHAT):
        if not complete.exists():
            _build(torch, folder)
            complete.touch()
    return folder


def cache_folder() -> Path:
    """The folder of the libraries, made if needed. Raises EmulatorError if other users could write to it."""
    return private_folder("emulated_gpu", WHAT, EmulatorError)


def find_torch() -> Path:
    """The folder of the installed torch, which is not imported. Raises EmulatorError for another CUDA version."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise EmulatorError("the emulated GPU needs a CUDA build of torch, and there is no torch: " + _how_to_install())
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        raise EmulatorError(
            f"the emulated GPU needs a CUDA build of torch, and {_version(torch)} is none: " + _how_to_install()
        )
    cuda = re.search(r"^cuda\b[^']*'(\d+)", (torch / "version.py").read_text(), re.MULTILINE)
    if cuda and int(cuda[1]) != CUDA_MAJOR:
        raise EmulatorError(
            f"the emulated GPU stands for CUDA {CUDA_MAJOR}, and {_version(torch)} is built for CUDA {cuda[1]}: "
            + _how_to_install()
        )
    return torch


def build_key(torch: Path) -> str:
    """A name that depends on all that the libraries depend on: torch's version, the sources, the flags."""
    digest = hashlib.sha256("\n".join([_version(torch), str(torch), *FLAGS, *TORCH_FLAGS, ENTRY_POINT]).encode())
    for path in [*sorted(source_root().rglob("*")), Path(__file__), Path(symbols.__file__)]:
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def source_root() -> Path:
    """Raises EmulatorError."""
    return toolchain.source_root(PACKAGE, "emulated_gpu", WHAT, EmulatorError) / "emulated_gpu"


def _version(torch: Path) -> str:
    found = re.search(r"__version__ = '([^']+)'", (torch / "version.py").read_text())
    return found[1] if found else "a torch without a version"


def _how_to_install() -> str:
    wheels = '"torch===2.13.0" "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-crt==13.0.*"'
    return (
        f"pip install --no-deps {wheels} gets it on Linux; without the libraries of a GPU it works on the emulated one "
        "alone, so give it an environment of its own"
    )


def _build(torch: Path, folder: Path) -> None:
    wanted = symbols.needed(torch / "lib")
    objects = cache_folder() / "objects"
    objects.mkdir(exist_ok=True)
    with ThreadPoolExecutor(1) as beside:
        headers = beside.submit(_headers_ahead, torch, objects)
        # The runtime comes first, because all other libraries link it.
        for soname in sorted(wanted, key=lambda name: name != RUNTIME):
            _build_library(soname, wanted[soname], objects, folder)
        _build_operators(torch, headers.result(), objects, folder)
    metadata = folder / "memo_emulated_gpu-0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: memo-emulated-gpu\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINT)


def _build_library(soname: str, wanted: dict[str, str | None], objects: Path, folder: Path) -> None:
    sources = sorted(source_root().glob(SOURCES.get(soname, "none")))
    flags = [*FLAGS, f"-I{cuda_include()}"]
    if SOURCES.get(soname, "").startswith("libraries/"):
        flags += LIBRARY_FLAGS
    compiled = _objects(objects, sources, flags)
    have = set().union(*map(symbols.defined, compiled)) if compiled else set()
    if soname == "libcuda.so.1":  # the runtime has these, and libcuda depends on it
        have |= symbols.defined(folder / RUNTIME)
    stubs = objects / f"{soname}.stubs.c"
    stubs.write_text("".join(_stub(soname, name) for name in sorted(wanted) if name not in have))
    _compile("-x", "c", "-w", "-fPIC", "-c", str(stubs), "-o", f"{stubs}.o")
    is_versioned = any(wanted.values())
    version = next(v for v in wanted.values() if v) if is_versioned else ""
    script = objects / f"{soname}.map"
    script.write_text(f"{version} {{ global: {EXPORTED} local: *; }};\n")
    link = [] if soname == RUNTIME else ["-Wl,--no-as-needed", str(folder / RUNTIME)]
    _compile(
        *("-shared", "-o", str(folder / soname), f"-Wl,-soname,{soname}", f"-Wl,--version-script={script}"),
        *(*map(str, compiled), f"{stubs}.o", *link, "-Wl,-rpath,$ORIGIN"),
    )


def _stub(soname: str, name: str) -> str:
    """The source of a function that is not emulated.

    Functions of the runtime, the driver and NCCL print their name and fail. Other functions are called only by host
    code around launches that are switched off. They succeed; a function that creates a handle returns an address.
    """
    if soname in (RUNTIME, NCCL, "libcuda.so.1"):
        report = f'__builtin_printf("emulated GPU: there is no {name}\\n")'
        return f"int {name}(void) {{ {report}; return {ERROR_NOT_SUPPORTED}; }}\n"
    if re.search(r"[Cc]reate(_v2|Handle)?$", name):
        return f"int {name}(void** made) {{ static long it[64]; if (made) *made = it; return 0; }}\n"
    return f"long {name}(void) {{ return 0; }}\n"


def _operator_flags(torch: Path) -> list[str]:
    includes = [torch / "include", torch / "include/torch/csrc/api/include", cuda_include()]
    return [*TORCH_FLAGS, *(f"-I{include}" for include in includes)]


def _headers_ahead(torch: Path, objects: Path) -> Path:
    """Precompile torch's headers, which take most of the compile time."""
    flags, header = _operator_flags(torch), source_root() / "operators" / "torch_headers.h"
    ahead = objects / _key(flags, header.read_bytes(), (torch / "version.py").read_bytes()) / header.name
    if not Path(f"{ahead}.gch").exists():
        ahead.parent.mkdir(exist_ok=True)
        shutil.copy(header, ahead)
        _compile(*flags, "-x", "c++-header", str(ahead), "-o", f"{ahead}.gch")
    return ahead


def _build_operators(torch: Path, headers: Path, objects: Path, folder: Path) -> None:
    sources = sorted((source_root() / "operators").glob("*.cpp"))
    compiled = _objects(objects, sources, [*_operator_flags(torch), "-include", str(headers)])
    _compile(
        *("-shared", "-o", str(folder / OPERATORS), *map(str, compiled), str(folder / RUNTIME)),
        *(f"-L{torch / 'lib'}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda", "-Wl,-rpath,$ORIGIN"),
    )


def _objects(objects: Path, sources: list[Path], flags: list[str]) -> list[Path]:
    """Compile sources in parallel on all cores; returns the object files."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(lambda source: _object(objects, source, flags), sources))


def _object(objects: Path, source: Path, flags: list[str]) -> Path:
    """The object file of a source; it is reused until the source, a header of memo or a flag changes."""
    headers = b"".join(path.read_bytes() for path in sorted(source_root().rglob("*.h")))
    target = objects / f"{source.parent.name}.{source.stem}.{_key(flags, source.read_bytes(), headers)}.o"
    if not target.exists():
        partial = target.with_suffix(".partial")
        _compile(*flags, "-c", str(source), "-o", str(partial))
        partial.replace(target)
    return target


def _key(flags: list[str], *contents: bytes) -> str:
    return hashlib.sha256(b"\n".join([*map(str.encode, flags), *contents])).hexdigest()[:24]


def _compile(*arguments: str) -> None:
    compiler = toolchain.find_compiler(WHAT, EmulatorError)
    symbols.output_of(compiler, *arguments)


def cuda_include() -> Path:
    """The folder of cuda_runtime_api.h. Raises EmulatorError."""
    return toolchain.cuda_include(find_torch(), WHAT, EmulatorError)

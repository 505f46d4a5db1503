"""Finds the CUDA libraries that the installed torch links, and the symbols that it needs of each."""

import re
import subprocess
from collections import defaultdict
from pathlib import Path

from memo.errors import EmulatorError

UNVERSIONED = (
    (r"nccl[A-Z]", "libnccl.so.2"),
    (r"cusparseLt", "libcusparseLt.so.0"),
    (r"cuFile", "libcufile.so.0"),
    (r"nvshmem", "libnvshmem_host.so.3"),
    (r"nvrtc", "libnvrtc.so.13"),
    (r"cu[A-Z]", "libcuda.so.1"),
)
"""(pattern, library) of symbols whose version does not name their library; the first matching pattern counts."""

ALWAYS = ("libcudart.so.13", "libcuda.so.1", "libnccl.so.2", "libnvidia-ml.so.1", "libnvrtc.so.13")
"""Libraries that are opened by name at run time, or in which memo defines more symbols than torch links."""


def needed(torch_lib: Path) -> dict[str, dict[str, str | None]]:
    """{soname of a library: {symbol that torch's libraries need from it: version of the symbol, or None}}.

    Raises EmulatorError if binutils are missing.
    """
    wanted: dict[str, dict[str, str | None]] = defaultdict(dict)
    for soname in ALWAYS:
        wanted[soname]
    for library in sorted(torch_lib.glob("*.so*")):
        for soname in re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl)[^\]]*)\]", output_of("readelf", "-d", str(library))):
            wanted[soname]
        for line in output_of("nm", "-D", "--undefined-only", str(library)).splitlines():
            name, _, version = line.split()[-1].partition("@")
            if home := _home(name, version):
                wanted[home][name] = version or None
    return dict(wanted)


def defined(binary: Path) -> set[str]:
    """The functions that an object file or a shared library exports."""
    dynamic = () if binary.suffix == ".o" else ("-D",)
    lines = output_of("nm", *dynamic, "--defined-only", str(binary)).splitlines()
    return {words[-1].partition("@")[0] for words in map(str.split, lines) if words[-2:-1] == ["T"]}


def output_of(*command: str) -> str:
    """The output of a command. Raises EmulatorError with its messages if it fails."""
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True)
    except FileNotFoundError:
        raise EmulatorError(
            f"the emulated GPU is built with {command[0]}, which is not here: install binutils"
        ) from None
    if done.returncode != 0:
        raise EmulatorError(f"{command[0]} failed while the emulated GPU was built:\n{done.stderr[-2000:]}")
    return done.stdout


def _home(name: str, version: str) -> str | None:
    if version == "NVSHMEM":
        return "libnvshmem_host.so.3"
    if re.match(r"lib(cu|nv)", version):
        return version
    if version:
        return None
    return next((soname for pattern, soname in UNVERSIONED if re.match(pattern, name)), None)

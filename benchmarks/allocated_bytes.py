"""Bytes that torch's CPU allocator was asked for and has not got back, of all threads of this process, gloo's too.

A small native library, built with the compiler that the planned allocator uses, lies over torch's allocator from
`AllocatedBytes.install()` until the process ends.
"""

import ctypes
import hashlib
from pathlib import Path

import torch

from memo.allocator.build import FLAGS, compile_sealed, find_compiler, kept_library

_SOURCE = Path(__file__).with_suffix(".cpp")


class AllocatedBytes:
    """Counts from its making on; blocks from before are not in it. Raises AllocatorError without a compiler."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_built()))
        self._library.allocated_live_bytes.restype = ctypes.c_uint64
        self._library.allocated_take_peak_bytes.restype = ctypes.c_uint64
        self._library.allocated_limit.argtypes = [ctypes.c_uint64]
        self._library.allocated_install()

    def limit(self, num_bytes: int) -> None:
        """From now on torch.OutOfMemoryError is raised by a request that would leave more than this alive."""
        self._library.allocated_limit(num_bytes)

    @property
    def live_bytes(self) -> int:
        return int(self._library.allocated_live_bytes())

    def take_peak_bytes(self) -> int:
        """The most since the last call, or since the beginning."""
        return int(self._library.allocated_take_peak_bytes())


def _built() -> Path:
    """The library for the running torch, compiled where there is none yet; renamed into place, so ranks may race."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:24]
    home, compiler = Path(torch.__file__).parent, find_compiler()
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"

    def command(output: Path) -> list[str]:
        paths = [f"-I{home / 'include'}", str(_SOURCE), "-o", str(output), f"-L{home / 'lib'}", "-lc10"]
        return [compiler, *FLAGS, abi, *paths]

    return kept_library("allocated", key, lambda target: compile_sealed(command, target, key))

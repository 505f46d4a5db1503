"""Counts the bytes that live in torch's CPU allocator, of all threads of this process, including gloo's.

A small native library, built with the compiler of the planned allocator, wraps torch's allocator from
`AllocatedBytes.install()` until the process ends.
"""

import ctypes
import hashlib
from pathlib import Path

import torch

from memo.allocator.build import FLAGS, compile_sealed, find_compiler, kept_library

_SOURCE = Path(__file__).with_suffix(".cpp")


class AllocatedBytes:
    """Counts blocks that are allocated after its construction. Raises AllocatorError without a compiler."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_built()))
        self._library.allocated_live_bytes.restype = ctypes.c_uint64
        self._library.allocated_take_peak_bytes.restype = ctypes.c_uint64
        self._library.allocated_limit.argtypes = [ctypes.c_uint64]
        self._library.allocated_install()

    def limit(self, num_bytes: int) -> None:
        """Let requests that would leave more than `num_bytes` alive raise torch.OutOfMemoryError from now on."""
        self._library.allocated_limit(num_bytes)

    @property
    def live_bytes(self) -> int:
        return int(self._library.allocated_live_bytes())

    def take_peak_bytes(self) -> int:
        """Return the peak since the last call, or since the beginning."""
        return int(self._library.allocated_take_peak_bytes())


def _built() -> Path:
    """Return the library for the running torch, compiled if there is none; renamed into place, as ranks may race."""
    key = hashlib.sha256(_SOURCE.read_bytes() + torch.__version__.encode()).hexdigest()[:24]
    home, compiler = Path(torch.__file__).parent, find_compiler()
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"

    def command(output: Path) -> list[str]:
        paths = [f"-I{home / 'include'}", str(_SOURCE), "-o", str(output), f"-L{home / 'lib'}", "-lc10"]
        return [compiler, *FLAGS, abi, *paths]

    return kept_library("allocated", key, lambda target: compile_sealed(command, target, key))

"""CUDA's runtime as a C program calls it, for rules that torch's own calls do not reach.

Host functions are the probe: each notes its name when its stream comes to it, so a list tells what has run by when.
"""

import ctypes
from collections.abc import Callable
from typing import Any

from memo.emulated_gpu.build import RUNTIME

SUCCESS = 0
INVALID_VALUE = 1
OUT_OF_MEMORY = 2
INVALID_RESOURCE_HANDLE = 400
NOT_READY = 600
ILLEGAL_ADDRESS = 700
HOST_MEMORY_ALREADY_REGISTERED = 712
HOST_MEMORY_NOT_REGISTERED = 713

BLOCKING, NON_BLOCKING = 0, 1
LEGACY: Any = None

HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Cuda:
    """Calls return their error; `ok` raises where it is not success."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(RUNTIME)
        self._kept: list[object] = []  # functions that the device may still call

    def call(self, name: str, *arguments: Any) -> int:
        wide = [ctypes.c_size_t(a) if isinstance(a, int) and a > 2**31 else a for a in arguments]
        return int(getattr(self.lib, name)(*wide))

    def ok(self, name: str, *arguments: Any) -> None:
        error = self.call(name, *arguments)
        assert error == SUCCESS, f"{name} returned {error}"

    def stream(self, flags: int = NON_BLOCKING) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.ok("cudaStreamCreateWithFlags", ctypes.byref(made), flags)
        return made

    def event(self) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self.ok("cudaEventCreate", ctypes.byref(made))
        return made

    def malloc(self, num_bytes: int, kind: str = "cudaMalloc") -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        more = [] if kind == "cudaMalloc" else [0]
        self.ok(kind, ctypes.byref(made), ctypes.c_size_t(num_bytes), *more)
        return made

    def host_function(self, stream: Any, act: Callable[[], object]) -> None:
        function = HostFunction(lambda _: act() and None)
        self._kept.append(function)
        self.ok("cudaLaunchHostFunc", stream, function, None)

    def note(self, stream: Any, notes: list[str], name: str) -> None:
        self.host_function(stream, lambda: notes.append(name))

    def copy(self, to: Any, source: Any, num_bytes: int, stream: Any = LEGACY) -> int:
        return self.call("cudaMemcpyAsync", to, source, ctypes.c_size_t(num_bytes), 4, stream)

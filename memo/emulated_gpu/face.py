"""The Python side of the emulated GPU; `import torch` loads it in a process that runs on an emulated GPU.

torch finds `autoload` through the entry point group torch.backends, in the folder that `launch` puts on the path.
"""

import collections
import contextlib
import ctypes
import faulthandler
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from memo.emulated_gpu.build import NCCL, OPERATORS, RUNTIME
from memo.emulated_gpu.launch import LIBRARIES, is_emulated

if TYPE_CHECKING:
    from memo.estimate.hardware import Hardware

HANG_SIGNAL = 40
"""The signal (kHangSignal) that the runtime raises if the host has waited for too long."""

MOST_CALLS = 12
"""The most calls of a Python stack that are recorded for a collective."""


def autoload() -> None:
    """Register the emulator's kernels with torch's dispatcher; make hangs print stacks, and collectives record them."""
    if not is_emulated():
        return
    operators = ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / OPERATORS))
    operators.emulated_install_operators()
    faulthandler.register(HANG_SIGNAL, all_threads=True)
    ctypes.CDLL(NCCL).emulated_on_collective(_write_calls)
    _emulate_host_memory()
    _emulate_time()


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_int)
def _write_calls(text: Any, num_chars: int) -> None:
    """Write the stack of this thread without torch's calls, innermost first, one call in each line."""
    frame = sys._getframe().f_back
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_CALLS:
        file = Path(frame.f_code.co_filename)
        if "torch" not in file.parts:
            lines.append(f"    {'/'.join(file.parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}\n")
        frame = frame.f_back
    content = "".join(lines).encode()[: num_chars - 1] + b"\0"
    ctypes.memmove(text, content, len(content))


def _emulate_host_memory() -> None:
    """Make psutil report the memory of the emulated machine, and ignore the control groups of the real machine."""
    num_bytes = _runtime().emulated_host_memory_bytes()
    if not num_bytes:
        return
    import psutil

    from memo.estimate import host_memory

    here = psutil.virtual_memory()
    psutil.virtual_memory = lambda: here._replace(total=num_bytes, available=num_bytes, free=num_bytes)
    vars(host_memory)["own_control_groups"] = lambda *_: iter(())


def _emulate_time() -> None:
    """Make time virtual if the setting `timed` names hardware."""
    name = _runtime().emulated_timed_hardware().decode()
    if name:
        from memo.estimate.machines import find_hardware

        EmulatedGpu().model_time(find_hardware(name))


def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(RUNTIME)  # already loaded
    runtime.emulated_host_memory_bytes.restype = ctypes.c_uint64
    runtime.emulated_timed_hardware.restype = ctypes.c_char_p
    return runtime


class HostWait(NamedTuple):
    """A call in which the host waits for the device."""

    what: str
    """The call of the runtime, or "copy from pageable memory", for which a driver may wait."""
    functions: tuple[str, ...]
    """Functions of memo on the stack, innermost first, with their modules, such as "memo.train.optimizer.step"."""


class EmulatedGpu:
    """Controls the runtime of this process and reads its reports, for all emulated devices of the process together."""

    def __init__(self) -> None:
        self._runtime = _runtime()
        self._listener: object = None

    def set_schedule(self, policy: str, seed: int = 0) -> None:
        """Set the policy (eager, lazy or random) after all work is done."""
        self._runtime.emulated_set_schedule(policy.encode(), ctypes.c_uint64(seed))

    def check_races(self, is_on: bool = True) -> None:
        self._runtime.emulated_set_race_checks(int(is_on))

    def counts(self) -> dict[str, int]:
        """Numbers of calls and waits since the last clear, by name."""
        return self._report("count")

    def races(self) -> dict[str, int]:
        """Unordered accesses since the last clear: {description: how often it occurred}."""
        return self._report("race")

    def taken_bytes(self) -> dict[str, int]:
        """Bytes that are allocated now, on each used device and, as "pinned", on the host."""
        return self._report("bytes")

    def take(self, num_bytes: int) -> bool:
        """Allocate memory of the current device for good, as libraries besides torch do; returns false if it is too
        much."""
        return self._runtime.cudaMalloc(ctypes.byref(ctypes.c_void_p()), ctypes.c_size_t(num_bytes)) == 0

    @property
    def is_timed(self) -> bool:
        """Whether time is virtual, computed by a model of the hardware."""
        return bool(self._runtime.emulated_timed_hardware())

    def model_time(self, hardware: "Hardware") -> None:
        """Let the model of this machine compute the time of all further work; only if `is_timed`."""
        from memo.emulated_gpu import timing

        timing.install(self._runtime, hardware)

    def taken_s(self) -> dict[str, float]:
        """Seconds of virtual time that kernels, copies and collectives took since the last clear, by name."""
        return {name: number * 1e-9 for name, number in self._report("nanoseconds").items()}

    def num_waits(self) -> int:
        """Number of waits of streams and of the host in this process so far."""
        return self._runtime.emulated_num_waits()

    def is_wait_redundant(self, number: int) -> bool:
        """Whether wait number `number` of the process, from 0 on, ordered only work that was already ordered.

        Known once its stream has got more work. A redundant wait could be left out of this run.
        """
        return bool(self._runtime.emulated_is_wait_redundant(ctypes.c_uint64(number)))

    @contextlib.contextmanager
    def hidden(self, *, waits: bool = False, recordings: bool = False) -> Iterator[None]:
        """A context in which the race checker ignores this thread's waits or recordings of events.

        They are still executed, so that results stay right and no rank hangs.
        """
        self._runtime.emulated_hide(int(waits), int(recordings))
        try:
            yield
        finally:
            self._runtime.emulated_hide(0, 0)

    def clear(self) -> None:
        self._runtime.emulated_clear_report()

    def on_synchronization(self, act: Callable[[str], None] | None) -> None:
        """Call `act` with the name of each call in which the host waits, on the waiting thread; None: stop."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._listener = kind(lambda what: act(what.decode())) if act else kind()
        self._runtime.emulated_on_synchronization(self._listener)

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[collections.Counter[HostWait]]:
        """A context that counts the waits of all threads of this process in the yielded counter."""
        found: collections.Counter[HostWait] = collections.Counter()
        self.on_synchronization(lambda what: found.update([HostWait(what, _running_functions())]))
        try:
            yield found
        finally:
            self.on_synchronization(None)

    def _report(self, kind: str) -> dict[str, int]:
        num_chars = self._runtime.emulated_report(ctypes.create_string_buffer(1), 1) + 4096
        text = ctypes.create_string_buffer(num_chars)
        self._runtime.emulated_report(text, num_chars)
        lines = (line.split("\t") for line in text.value.decode().splitlines())
        return {name: int(times) for found, name, times in lines if found == kind}


def _running_functions() -> tuple[str, ...]:
    """Functions of memo on the stack of this thread, without functions of this module."""
    frame: FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("memo.") and module != __name__:
            found.append(f"{module}.{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)

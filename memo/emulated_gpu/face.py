"""The Python side of the emulated GPU, in a process that runs on one: torch loads it when it is imported.

torch finds `autoload` by its entry point group torch.backends, in the folder that `launch` puts on the path.
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
from typing import Any, NamedTuple

from memo.emulated_gpu.build import NCCL, OPERATORS, RUNTIME
from memo.emulated_gpu.launch import LIBRARIES, is_emulated

HANG_SIGNAL = 40
"""The runtime raises it (kHangSignal) when the host has waited for too long."""

MOST_CALLS = 12
"""Of a program that called a collective, that are kept."""


def autoload() -> None:
    """Put our kernels into torch's dispatcher; have what hangs tell its stacks, and each collective its calls."""
    if not is_emulated():
        return
    operators = ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / OPERATORS))
    operators.emulated_install_operators()
    faulthandler.register(HANG_SIGNAL, all_threads=True)
    ctypes.CDLL(NCCL).emulated_on_collective(_write_calls)
    _tell_host_memory()
    _tell_time()


@ctypes.CFUNCTYPE(None, ctypes.POINTER(ctypes.c_char), ctypes.c_int)
def _write_calls(text: Any, num_chars: int) -> None:
    """The calls of this thread outside of torch, innermost first, a line each."""
    frame = sys._getframe().f_back
    lines: list[str] = []
    while frame is not None and len(lines) < MOST_CALLS:
        file = Path(frame.f_code.co_filename)
        if "torch" not in file.parts:
            lines.append(f"    {'/'.join(file.parts[-3:])}:{frame.f_lineno} in {frame.f_code.co_name}\n")
        frame = frame.f_back
    content = "".join(lines).encode()[: num_chars - 1] + b"\0"
    ctypes.memmove(text, content, len(content))


def _tell_host_memory() -> None:
    """The emulated machine's memory is what memo asks psutil for, and no control group of this machine bounds it."""
    num_bytes = _runtime().emulated_host_memory_bytes()
    if not num_bytes:
        return
    import psutil

    from memo.estimate import host_memory

    here = psutil.virtual_memory()
    psutil.virtual_memory = lambda: here._replace(total=num_bytes, available=num_bytes, free=num_bytes)
    vars(host_memory)["own_control_groups"] = lambda *_: iter(())


def _tell_time() -> None:
    """Where the setting `timed` names hardware."""
    name = _runtime().emulated_timed_hardware().decode()
    if name:
        from memo.emulated_gpu import timing

        timing.install(_runtime(), name)


def _runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(RUNTIME)  # the one that is loaded already
    runtime.emulated_host_memory_bytes.restype = ctypes.c_uint64
    runtime.emulated_timed_hardware.restype = ctypes.c_char_p
    return runtime


class HostWait(NamedTuple):
    """What the host waits in, and for whom."""

    what: str
    """The call of the runtime; "copy from pageable memory": a driver may wait before it stages one."""
    functions: tuple[str, ...]
    """Of memo, that run: innermost first, with their modules, such as "memo.train.optimizer.step"."""


class EmulatedGpu:
    """What the runtime of this process tells, and how it schedules. All devices of the process together."""

    def __init__(self) -> None:
        self._runtime = _runtime()
        self._listener: object = None

    def set_schedule(self, policy: str, seed: int = 0) -> None:
        """Waits for all work first. `policy`: eager, lazy or random."""
        self._runtime.emulated_set_schedule(policy.encode(), ctypes.c_uint64(seed))

    def check_races(self, is_on: bool = True) -> None:
        self._runtime.emulated_set_race_checks(int(is_on))

    def counts(self) -> dict[str, int]:
        """Calls and waits since the last clear, by name."""
        return self._report("count")

    def races(self) -> dict[str, int]:
        """Unordered accesses since the last clear: each by its text, with how often it was seen."""
        return self._report("race")

    def taken_bytes(self) -> dict[str, int]:
        """What is taken now: of each device that was used, and of the host's memory "pinned"."""
        return self._report("bytes")

    @property
    def is_timed(self) -> bool:
        """Whether time is virtual: that of a model of the hardware."""
        return bool(self._runtime.emulated_timed_hardware())

    def taken_s(self) -> dict[str, float]:
        """Seconds of virtual time that kernels, copies and collectives took since the last clear, by name."""
        return {name: number * 1e-9 for name, number in self._report("nanoseconds").items()}

    def num_waits(self) -> int:
        """Waits of streams and of the host so far, of the whole process."""
        return self._runtime.emulated_num_waits()

    def is_wait_redundant(self, number: int) -> bool:
        """Whether the wait that so many came before ordered nothing new, known once its stream has got more work.

        Such a wait may be left out of this run: what its event stands for had happened before by other ways.
        """
        return bool(self._runtime.emulated_is_wait_redundant(ctypes.c_uint64(number)))

    @contextlib.contextmanager
    def hidden(self, *, waits: bool = False, recordings: bool = False) -> Iterator[None]:
        """What this thread waits for, or records, inside keeps its place in time, and no order follows from it.

        So the race checker judges the program without these calls, while its numbers stay right and no rank hangs.
        """
        self._runtime.emulated_hide(int(waits), int(recordings))
        try:
            yield
        finally:
            self._runtime.emulated_hide(0, 0)

    def clear(self) -> None:
        self._runtime.emulated_clear_report()

    def on_synchronization(self, act: Callable[[str], None] | None) -> None:
        """`act` is called with what makes the host wait, each time, on the thread that waits; None: nothing is."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._listener = kind(lambda what: act(what.decode())) if act else kind()
        self._runtime.emulated_on_synchronization(self._listener)

    @contextlib.contextmanager
    def host_waits(self) -> Iterator[collections.Counter[HostWait]]:
        """Counts the waits of all threads of this process inside; what is yielded grows as they happen."""
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
    """On this thread; without this module's own."""
    frame: FrameType | None = sys._getframe()
    found = []
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("memo.") and module != __name__:
            found.append(f"{module}.{frame.f_code.co_name}")
        frame = frame.f_back
    return tuple(found)

"""The Python side of the emulated GPU, in a process that runs on one: torch loads it when it is imported.

torch finds `autoload` by its entry point group torch.backends, in the folder that `launch` puts on the path.
"""

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

from memo.emulated_gpu.build import OPERATORS, RUNTIME
from memo.emulated_gpu.launch import LIBRARIES, is_emulated


def autoload() -> None:
    """Put our kernels into torch's dispatcher."""
    if is_emulated():
        operators = ctypes.CDLL(str(Path(os.environ[LIBRARIES]) / OPERATORS))
        operators.emulated_install_operators()


class EmulatedGpu:
    """What the runtime of this process tells, and how it schedules. All devices of the process together."""

    def __init__(self) -> None:
        self._runtime = ctypes.CDLL(RUNTIME)  # the one that is loaded already
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

    def clear(self) -> None:
        self._runtime.emulated_clear_report()

    def on_synchronization(self, act: Callable[[str], None] | None) -> None:
        """`act` is called with what makes the host wait, each time, on the thread that waits; None: nothing is."""
        kind = ctypes.CFUNCTYPE(None, ctypes.c_char_p)
        self._listener = kind(lambda what: act(what.decode())) if act else kind()
        self._runtime.emulated_on_synchronization(self._listener)

    def _report(self, kind: str) -> dict[str, int]:
        num_chars = self._runtime.emulated_report(ctypes.create_string_buffer(1), 1) + 4096
        text = ctypes.create_string_buffer(num_chars)
        self._runtime.emulated_report(text, num_chars)
        lines = (line.split("\t") for line in text.value.decode().splitlines())
        return {name: int(times) for found, name, times in lines if found == kind}

"""Runs a command on the emulated GPU: python -m memo.emulated_gpu --schedule lazy -- memo train --device cuda ...

LD_PRELOAD loads the libraries in the command and in every process that it starts. The loader does not search for a
library whose soname is already loaded, so torch's own search path and a real driver are not used. torch is not changed,
and no real GPU is used.
"""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from memo.emulated_gpu import build
from memo.estimate.machines import find_hardware


@dataclass(frozen=True)
class Device:
    """The emulated GPUs and how their work is scheduled; csrc/emulated_gpu/runtime/settings.h reads it."""

    name: str = "NVIDIA H100 80GB HBM3"
    num_devices: int = 8
    memory_gib: float = 80.0
    context_gib: float = 0.5
    """Memory of a device that a process loses once it uses the device (CUDA's context)."""
    capability: int = 90
    """Compute capability times ten."""
    multiprocessors: int = 132
    schedule: str = "eager"
    """eager: work runs as soon as it can. lazy: only when the host waits for it. random: in an order from `seed`."""
    seed: int = 0
    check_races: bool = False
    """Report unordered accesses to the same bytes."""
    poison: bool = False
    """Fill device memory with NaN when torch's allocator hands it out and when it takes it back."""
    without_numbers: bool = False
    """Tensors above 64 KiB have no content and take no memory, so that a rank of any size can run."""
    host_memory_gib: float = 0.0
    """Host memory of the emulated machine, which is reported and limits pinned memory; 0: the real machine's."""
    timed: str = ""
    """Hardware by name or file (memo.estimate.machines) whose model gives virtual time; "": real time."""
    host_launch_s: float = 5e-6
    """Virtual time that the host takes to queue a kernel, a copy or a collective. Assumed: torch's operators take 5 to
    10 us each from Python."""
    max_product_gflop: float = 100.0
    """Larger matrix products would take a CPU minutes; their results are zeros, with a warning."""
    hang_s: float = 60.0
    """Longer waits of the host are reported on standard error."""

    def text(self) -> str:
        """The content of the settings file."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return "".join(f"{name} {int(value) if isinstance(value, bool) else value}\n" for name, value in values)


LIBRARIES = "EMULATED_GPU_LIBRARIES"
"""The environment variable with the folder of the libraries; if it is set, the process runs on an emulated GPU."""


def is_emulated() -> bool:
    """Whether this process runs on an emulated GPU."""
    return LIBRARIES in os.environ


def environment(device: Device, settings_file: Path, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for a process on `device`; writes the settings file. Raises EmulatorError.

    If `base` is already the environment of an emulated GPU, the new process has `device` and the same libraries.
    """
    settings_file.write_text(device.text())
    settings = {"EMULATED_GPU": str(settings_file)}
    if LIBRARIES in base:
        return {**base, **settings}
    folder = build.libraries()
    # CUDA_VISIBLE_DEVICES is about real GPUs; on a login node it may hide all of them.
    base = {name: value for name, value in base.items() if name != "CUDA_VISIBLE_DEVICES"}
    # The runtime comes first, because all other libraries need it. memo must be importable, because torch imports
    # memo.emulated_gpu.face.
    others = (str(path) for path in folder.glob("lib*.so.*") if path.name != build.RUNTIME)
    preload = [str(folder / build.RUNTIME), *sorted(others), base.get("LD_PRELOAD", "")]
    paths = [str(folder), str(Path(__file__).parents[2]), base.get("PYTHONPATH", "")]
    return {
        **base,
        **settings,
        LIBRARIES: str(folder),
        "LD_PRELOAD": ":".join(filter(None, preload)),
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }


def run(device: Device, command: list[str]) -> None:
    """Replace this process by the command. Raises EmulatorError, FileNotFoundError or ConfigError."""
    if device.timed:
        find_hardware(device.timed)
    # The file is kept under a name that depends on its content, because processes that outlive the command may read it.
    digest = hashlib.sha256(device.text().encode()).hexdigest()[:12]
    folder = build.cache_folder() / "devices"
    folder.mkdir(parents=True, exist_ok=True)
    os.execvpe(command[0], command, environment(device, folder / f"{digest}.txt"))

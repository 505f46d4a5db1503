"""Finds a machine by the names that tables and people use, such as `a100-40gb` or `RTX 4090`, by its GPU, or by a
file."""

import difflib

from memo.errors import ConfigError
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_files import HARDWARE, read_hardware

DEFAULT = "a800-80"
"""The machine of the MEMO paper."""


def find_hardware(name: str, memory_gib: float | None = None) -> Hardware:
    """Return the GPU machine of that name, with or without `gb`, or the machine whose GPU driver reports that name.

    If the name has no memory size, `memory_gib` selects the machine; it may be the nominal size.

    A name that ends in .toml is a file of `memo.estimate.hardware_files`. Raises ConfigError with the nearest name, or
    with the error in the file.
    """
    if name.endswith(".toml"):
        return read_hardware(name)
    wanted = (name or DEFAULT).strip().lower().removesuffix("gib").removesuffix("gb")
    wanted = "-".join(wanted.split())
    family = wanted.rpartition("-")[0]
    for key in (wanted, family):
        if key in HARDWARE and HARDWARE[key].device == "cuda":
            return HARDWARE[key]
    machines = {key: machine for key, machine in HARDWARE.items() if machine.device == "cuda"}
    kin = [machine for key, machine in machines.items() if key.startswith(f"{wanted}-")]
    fitting = [machine for machine in kin if memory_gib is None or _is_about(machine.memory_gib, memory_gib)]
    if fitting:
        return fitting[0]
    of_gpu = machine_of_gpu(name.strip(), memory_gib or 0)
    if of_gpu is not None:
        return of_gpu
    longer = [key for key in machines if key.startswith(wanted)]
    near = longer or difflib.get_close_matches(wanted, machines, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"no such machine: {hint}`memo hardware` lists all, and tells how to describe another one")


def named_hardware(flag: str, name: str, memory_gib: float | None = None) -> Hardware:
    """Return the machine that `find_hardware` finds; an error names the flag that gave the name."""
    try:
        return find_hardware(name, memory_gib)
    except ConfigError as error:
        text = str(error)
        raise ConfigError(text if text.startswith("--") else f"{flag} {name}: {text}") from None


def require_full_nodes(flag: str, gpus: int, machine: Hardware) -> None:
    """Raises ConfigError for GPUs that need several nodes but do not fill them; `flag` named the machine."""
    if gpus > machine.gpus_per_node and gpus % machine.gpus_per_node:
        raise ConfigError(
            f"--gpus {gpus} do not fill nodes of {machine.gpus_per_node} ({flag} {machine.name}): use --gpus "
            f"{gpus // machine.gpus_per_node * machine.gpus_per_node}, or a hardware file with other gpus_per_node"
        )


def machine_of_gpu(driver_name: str, memory_gib: float) -> Hardware | None:
    """Return the known machine whose GPU driver reports this name; None for a GPU that no known machine has.

    If several machines have this GPU, the one nearest in memory is returned. Names are compared whole, because parts of
    names would mislead: see memo.estimate.gpu_peaks.
    """
    same = [
        machine
        for machine in HARDWARE.values()
        if machine.device == "cuda" and _bare(machine.driver_name) == _bare(driver_name)
    ]
    return min(same, key=lambda machine: abs(machine.memory_gib - memory_gib)) if same else None


def nearest_hardware(device_name: str, memory_gib: float) -> Hardware:
    """Return the known machine with this GPU, else the machine whose GPU is nearest in memory; for "cpu" the CPU."""
    if device_name == "cpu":
        return HARDWARE["cpu"]
    machines = [machine for machine in HARDWARE.values() if machine.device == "cuda"]
    nearest = min(machines, key=lambda machine: abs(machine.memory_gib - memory_gib))
    return machine_of_gpu(device_name, memory_gib) or nearest


def _is_about(one: float, other: float) -> bool:
    """Return whether two sizes agree within 5 %: drivers report so much less or more than the nominal memory."""
    return abs(one - other) <= 0.05 * other


def _bare(driver_name: str) -> str:
    """Return the name in lower case without the maker's name, which older drivers leave out."""
    return driver_name.lower().removeprefix("nvidia ")

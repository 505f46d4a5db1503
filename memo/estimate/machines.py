"""Finds a machine by the names that tables and people use: `a100-40gb`, `H200-141GB`, `a100` and its memory, a file."""

import difflib

from memo.errors import ConfigError
from memo.estimate.hardware import Hardware
from memo.estimate.hardware_file import read_hardware
from memo.estimate.hardware_table import HARDWARE

DEFAULT = "a800-80"
"""The machine of the MEMO paper."""

SAME_MEMORY = {"a100-80": "a800-80"}
"""An A800 is an A100 with slower links between the GPUs of a node."""


def find_hardware(name: str, memory_gib: float | None = None) -> Hardware:
    """The GPU machine of that name, with or without `gb`; a name without memory takes the one with `memory_gib`.

    A name that ends in .toml is a file of `memo.estimate.hardware_file`. Raises ConfigError with the nearest name, or
    with what is wrong in the file.
    """
    if name.endswith(".toml"):
        return read_hardware(name)
    machines = {key: machine for key, machine in HARDWARE.items() if machine.device == "cuda"}
    wanted = (name or DEFAULT).strip().lower().removesuffix("gib").removesuffix("gb")
    family = wanted.rpartition("-")[0]
    for key in (wanted, SAME_MEMORY.get(wanted, ""), family):
        if key in machines:
            return machines[key]
    kin = [machine for key, machine in machines.items() if key.startswith(f"{wanted}-")]
    fitting = [machine for machine in kin if memory_gib in (None, machine.memory_gib)]
    if fitting:
        return fitting[0]
    near = difflib.get_close_matches(wanted, machines, n=1, cutoff=0.5)
    hint = f"did you mean '{near[0]}'? " if near else ""
    raise ConfigError(f"no such machine: {hint}use one of {', '.join(machines)}")


def named_hardware(flag: str, name: str, memory_gib: float | None = None) -> Hardware:
    """The same as `find_hardware`, with an error that names the flag that gave the name."""
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


def nearest_hardware(device_name: str, memory_gib: float) -> Hardware:
    """The known GPU machine most like a device of this name and memory; for "cpu" the known CPU.

    It is chosen by the family in the device's name (NVIDIA A100-SXM4-80GB) and then by memory; by memory alone if the
    family is unknown.
    """
    if device_name == "cpu":
        return HARDWARE["cpu"]
    machines = [machine for machine in HARDWARE.values() if machine.device == "cuda"]
    kin = [machine for machine in machines if machine.name.split("-")[0] in device_name.lower()]
    return min(kin or machines, key=lambda machine: abs(machine.memory_gib - memory_gib))

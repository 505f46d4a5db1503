"""`memo hardware`: lists the machines that plans and estimates know by name, and how to describe a new one."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

from memo.config.command_line import parse_options
from memo.config.flag import Flag
from memo.config.run import toml_value
from memo.errors import ConfigError
from memo.estimate.hardware import Efficiency, Hardware
from memo.estimate.hardware_files import HARDWARE
from memo.estimate.machines import named_hardware
from memo.estimate.prices import PRICES
from memo.estimate.time_errors import EXPERTS, FLASH_2, evidence_of
from memo.text_table import terminal_columns, text_table

_COLUMNS: dict[str, Callable[[Hardware], str]] = {
    "name": lambda machine: machine.name,
    "GPU, as its driver reports it": lambda machine: machine.driver_name or "none",
    "bf16 TFLOP/s": lambda machine: f"{machine.peak_tflops['bf16']:g}",
    "GiB": lambda machine: f"{machine.memory_gib:.4g}",
    "GB/s": lambda machine: f"{machine.memory_gb_per_s:g}",
    "to host GB/s": lambda machine: f"{machine.offload_gb_per_s:g}",
    "in node GB/s": lambda machine: f"{machine.node_gb_per_s:g}",
    "GPUs a node": lambda machine: str(machine.gpus_per_node),
    "host GiB a node": lambda machine: f"{machine.host_memory_gib:g}",
    "$/GPU/h": lambda machine: f"{PRICES[machine.name].dollars_per_gpu_hour:.2f}" if machine.name in PRICES else "",
}
_SPARE = ("GPU, as its driver reports it", "host GiB a node", "GPUs a node", "in node GB/s", "to host GB/s")
"""Columns that a narrow terminal leaves out, in this order."""
_HOW = (
    "`memo hardware NAME` tells what is assumed of one. Another machine: `memo hardware NAME --toml > mine.toml` for "
    "the nearest one, mend what differs, and give --hardware mine.toml."
)

EXAMPLES = (
    "memo hardware                          # all machines, one in each line",
    "memo hardware h100-80                  # all that is assumed of one machine, and the source of each number",
    "memo hardware h100-80 --toml > mine.toml   # a file to change, for --hardware mine.toml",
)


@dataclass(frozen=True, kw_only=True)
class _Options:
    """List the machines that plans and estimates know by name, and tell how to describe a new one."""

    name: Annotated[str, Flag(metavar="NAME", is_positional=True)] = ""
    """A machine, or the TOML file of one: print all that is assumed of it, and the source of each number."""
    toml: bool = False
    """Print that machine as the file that --hardware takes."""
    wide: bool = False
    """Print every column, however narrow the terminal is."""


def main(argv: Sequence[str]) -> None:
    """Raises ConfigError for an unknown machine, and for --toml without a machine."""
    options = parse_options(_Options, argv, prog="memo hardware", examples=EXAMPLES)
    columns = None if options.wide else terminal_columns()
    if options.name:
        machine = HARDWARE["cpu"] if options.name == "cpu" else named_hardware("memo hardware", options.name)
        print(_as_toml(machine) if options.toml else _described(machine, columns))
        return
    if options.toml:
        raise ConfigError("--toml prints one machine, but none is named: give its name, such as memo hardware h100-80")
    rows = [list(_COLUMNS), *([cell(machine) for cell in _COLUMNS.values()] for machine in HARDWARE.values())]
    print(text_table(rows, {0, 1}, columns=columns, spare=[rows[0].index(name) for name in _SPARE]))
    prices = next(iter(PRICES.values()))
    print(f"\n{_HOW}\nPrices: {prices.kind}, {prices.source}; `memo hardware NAME` tells that of spot as well.")


def _described(machine: Hardware, columns: int | None) -> str:
    price = PRICES.get(machine.name)
    rows = [(name, _shown(value)) for name, value in _fields(machine)]
    rows += [(f"efficiency.{name}", _shown(value)) for name, value in _fields(machine.efficiency)]
    rows.append(("price", "none known" if price is None else price.told))
    rows += [("error of a step's seconds", str(each)) for each in (*evidence_of(machine), EXPERTS, FLASH_2)]
    return text_table(rows, {0, 1}, columns=columns, wrapped=(1,))


def _shown(value: object) -> str:
    return ", ".join(f"{key} {each:g}" for key, each in value.items()) if isinstance(value, dict) else str(value)


def _as_toml(machine: Hardware) -> str:
    """All fields except the name, which is the name of the file."""
    lines = [f'like = "{machine.name}"' if machine.name in HARDWARE else 'like = "h100-80"']
    for name, value in _fields(machine):
        if isinstance(value, dict):
            lines += [f"{name}.{key} = {toml_value(each)}" for key, each in value.items()]
        elif name != "name" and value not in (0, ""):
            lines.append(f"{name} = {toml_value(value)}")
    lines += ["", "[efficiency]"]
    return "\n".join([*lines, *(f"{name} = {toml_value(value)}" for name, value in _fields(machine.efficiency))])


def _fields(of: Hardware | Efficiency) -> Iterator[tuple[str, object]]:
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if not isinstance(value, Efficiency):
            yield field.name, value

"""Machines as TOML files: the machines that memo knows by name, and a user's own machine (--hardware FILE.toml).

A file has fields of `memo.estimate.hardware.Hardware`; it takes all missing fields from the machine in `like`.

like = "h100-80"
memory_gib = 94
gpus_per_node = 4
peak_tflops.bf16 = 989.4
[efficiency]
matmul = 0.6
source = "measured on our cluster in May"

The sources of the known machines' numbers are in their field `source`, and in machine_files/README.md.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from memo.artifacts.fields import checked, field_types
from memo.artifacts.reading import Source, read_toml, shown
from memo.errors import ConfigError
from memo.estimate.gpu_peaks import bf16_peak_tflops
from memo.estimate.hardware import Efficiency, Hardware, Size
from memo.lazy_mapping import LazyMapping
from memo.units import DTYPE_BYTES

_FOLDER = Path(__file__).parent / "machine_files"


def read_hardware(path: str | Path) -> Hardware:
    """Return the machine that a file describes; its name is by default the name of the file.

    The peak in bf16 is by default the peak of the GPU in `driver_name`, if memo knows this GPU.

    Raises ConfigError for a file that cannot be read, an unknown field or base, and a value of a wrong type or range.
    """
    source = f"--hardware {path}"
    document = read_toml(path, Source(source, ConfigError, f"give the path of a TOML file, or one of {_listed()}"))
    like = document.pop("like", None)
    given_efficiency = _table(document, "efficiency", source)
    given_peaks = _table(document, "peak_tflops", source)
    _require_known(document, [field.name for field in fields(Hardware)], source)
    _require_known(given_efficiency, [field.name for field in fields(Efficiency)], f"{source} [efficiency]")
    _require_known(given_peaks, DTYPE_BYTES, f"{source} [peak_tflops]")
    mend, types, of_shares = Source(source, ConfigError, ""), field_types(Hardware), field_types(Efficiency)
    values = {name: checked(types[name], value, name, mend) for name, value in document.items()}
    shares = {
        name: checked(of_shares[name], value, f"efficiency.{name}", mend) for name, value in given_efficiency.items()
    }
    own_peak = bf16_peak_tflops(values.get("driver_name", ""))
    peaks: dict[Any, float] = {} if own_peak is None else {"bf16": own_peak}
    peaks |= {dtype: checked(Size, value, f"peak_tflops.{dtype}", mend) for dtype, value in given_peaks.items()}
    values.setdefault("name", Path(path).stem)
    values.setdefault("source", str(path))
    if like is None and _are_all_there(values, shares):
        return Hardware(peak_tflops=peaks, efficiency=Efficiency(**shares), **values)
    base = _base(like, source)
    if not {"offload_gb_per_s", "prefetch_gb_per_s"}.isdisjoint(values):
        values.setdefault("alone_gb_per_s", 0.0)  # the base's value was measured on its own link
    return replace(
        base,
        peak_tflops={**base.peak_tflops, **peaks},
        efficiency=replace(base.efficiency, **shares),
        **values,
    )


def _are_all_there(values: Mapping[str, object], shares: Mapping[str, object]) -> bool:
    needed = {f.name for of in (Hardware, Efficiency) for f in fields(of) if f.default is MISSING}
    return needed <= {*values, *shares, "peak_tflops", "efficiency"}


def _base(name: object, source: str) -> Hardware:
    if not isinstance(name, str) or name not in HARDWARE:
        given = "there is no `like`" if name is None else f"like is {shown(name)}, which is no machine of the table"
        raise ConfigError(f'{source}: {given}: name the nearest machine, such as like = "h100-80", of {_listed()}')
    return HARDWARE[name]


def _table(document: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    table = document.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name} is {shown(table)}, but it is a table: write [{name}] and its fields below")
    return table


def _require_known(given: Mapping[str, object], known: Iterable[str], source: str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{source}: there is no field {shown(name)}: {hint}")


def _listed() -> str:
    return ", ".join(HARDWARE)


HARDWARE: Mapping[str, Hardware] = LazyMapping(
    {path.stem: partial(read_hardware, path) for path in sorted(_FOLDER.glob("*.toml"), key=lambda path: path.stem)}
)
"""The machines that memo knows, by name."""

"""A machine described by a TOML file (--hardware FILE.toml): one of the table with fields replaced.

like = "h100-80"
memory_gib = 94
gpus_per_node = 4
peak_tflops.bf16 = 989.4
[efficiency]
matmul = 0.6
source = "measured on our cluster in May"
"""

import difflib
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from math import isfinite
from pathlib import Path
from typing import Any

from memo.errors import ConfigError
from memo.estimate.hardware import Efficiency, Hardware
from memo.estimate.hardware_table import HARDWARE
from memo.units import DTYPE_BYTES

_TEXT = {"name", "source", "device"}
_COUNTS = {"gpus_per_node", "host_cores"}
_SHARES = {field.name for field in fields(Efficiency)} - {"matmul_half_size", "attention_half_head", "kernel_s"}
_SHARES -= {"collective_s", "host_core_gb_per_s", "source"}


def read_hardware(path: str | Path) -> Hardware:
    """The machine that a file describes; its name is the file's unless it gives one.

    Raises ConfigError: a file that cannot be read, an unknown field or base, a value of a wrong type or range.
    """
    source = f"--hardware {path}"
    document = _load(Path(path), source)
    base = _base(document.pop("like", None), source)
    given_efficiency = _table(document, "efficiency", source)
    given_peaks = _table(document, "peak_tflops", source)
    _require_known(document, [field.name for field in fields(Hardware)], source)
    _require_known(given_efficiency, [field.name for field in fields(Efficiency)], f"{source} [efficiency]")
    _require_known(given_peaks, DTYPE_BYTES, f"{source} [peak_tflops]")
    values = {name: _checked(Hardware, name, value, source) for name, value in document.items()}
    shares = {name: _checked(Efficiency, name, value, source) for name, value in given_efficiency.items()}
    peaks: dict[Any, float] = {
        dtype: _positive(f"peak_tflops.{dtype}", value, source) for dtype, value in given_peaks.items()
    }
    values.setdefault("name", Path(path).stem)
    values.setdefault("source", str(path))
    return replace(
        base,
        peak_tflops={**base.peak_tflops, **peaks},
        efficiency=replace(base.efficiency, **shares),
        **values,
    )


def _load(path: Path, source: str) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = "the file does not exist" if isinstance(error, FileNotFoundError) else error.strerror
        raise ConfigError(f"{source}: {reason}: give the path of a TOML file, or one of {_names()}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{source}: not valid TOML ({error}): mend the file") from None


def _base(name: object, source: str) -> Hardware:
    if not isinstance(name, str) or name not in HARDWARE:
        given = "there is no `like`" if name is None else f"like is {name!r}, which is no machine of the table"
        raise ConfigError(f'{source}: {given}: name the nearest machine, such as like = "h100-80", of {_names()}')
    return HARDWARE[name]


def _table(document: dict[str, Any], name: str, source: str) -> dict[str, Any]:
    table = document.pop(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{source}: {name} is {table!r}, but it is a table: write [{name}] and its fields below")
    return table


def _require_known(given: Mapping[str, object], known: Iterable[str], source: str) -> None:
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean '{near[0]}'?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{source}: there is no field '{name}': {hint}")


def _checked(section: type, name: str, value: object, source: str) -> Any:
    if name in _TEXT:
        choices = {"device": ("cuda", "cpu")}.get(name)
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = f"one of {', '.join(choices)}" if choices else "a text"
            raise ConfigError(f"{source}: {name} is {value!r}: give {wanted}")
        return value
    if name == "copies_overlap":
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {name} is {value!r}: give true or false")
        return value
    if name in _COUNTS and (not isinstance(value, int) or isinstance(value, bool)):
        raise ConfigError(f"{source}: {name} is {value!r}: give a whole number, such as 8")
    number = _positive(name, value, source)
    if section is Efficiency and name in _SHARES and number > 1:
        raise ConfigError(f"{source}: efficiency.{name} is {value}, but it is a share of a peak: give 0 to 1")
    return value if name in _COUNTS else number


def _positive(name: str, value: object, source: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
        raise ConfigError(f"{source}: {name} is {value!r}: give a positive number")
    return float(value)


def _names() -> str:
    return ", ".join(HARDWARE)

"""Rows that benchmarks print and keep: one JSON object each, with its command, device and versions."""

import contextlib
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def environment() -> dict[str, Any]:
    """Return command, commit, date, device and versions of this run; on CUDA also the driver and the current clocks."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    return {
        "command": " ".join([Path(sys.executable).name, _from_root(sys.argv[0]), *sys.argv[1:]]),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **(_gpu() if torch.cuda.is_available() else {"device": _cpu_name()}),
    }


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    """Keep `rows` as results/NAME.jsonl; rows without an environment, which are of this run, get it."""
    return _write(name, [{**environment(), **row} for row in rows])


class Journal:
    """Rows of one script, on disk after each of them, so that none is lost when time runs out.

    The first row replaces the file of an earlier run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> dict[str, Any]:
        self.rows.append({**row, **environment()})
        self._keep()
        print(json.dumps(row), flush=True)
        return self.rows[-1]

    def replace(self, row: dict[str, Any], *names: str) -> dict[str, Any]:
        """Add a row in place of an earlier row with the same values of `names`; all further rows of the file stay."""
        self.rows = [old for old in read(self.name) if any(old[name] != row[name] for name in names)]
        return self.add(row)

    def amend(self, row: dict[str, Any], **values: Any) -> None:
        """Add values to a row that was added before, such as a ratio that needs a later row."""
        row.update(values)
        self._keep()

    def _keep(self) -> None:
        _write(self.name, self.rows)


def read(name: str) -> list[dict[str, Any]]:
    """Return the rows of results/NAME.jsonl; none if there is no such file."""
    path = RESULTS / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _write(name: str, rows: list[dict[str, Any]]) -> Path:
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".partial")  # a script that is killed while it writes leaves the earlier file whole
    beside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    beside.replace(path)
    return path


def _from_root(script: str) -> str:
    """Return the path of a script in the repository, wherever that is checked out."""
    path = Path(script).resolve()
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else script


def _gpu() -> dict[str, Any]:
    """Return facts of the first GPU from NVML, which takes no device memory; without NVML only torch's name of it."""
    facts: dict[str, Any] = {"cuda": torch.version.cuda}
    with contextlib.suppress(Exception):  # pynvml raises classes of its own, and containers hide the driver's library
        import pynvml

        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(0).uuid  # CUDA_VISIBLE_DEVICES renumbers devices for torch alone
        gpu = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        facts["device"] = _text(pynvml.nvmlDeviceGetName(gpu))
        facts["driver"] = _text(pynvml.nvmlSystemGetDriverVersion())
        for name, clock in (("sm", pynvml.NVML_CLOCK_SM), ("memory", pynvml.NVML_CLOCK_MEM)):
            facts[f"{name}_clock_mhz"] = pynvml.nvmlDeviceGetClockInfo(gpu, clock)
            facts[f"{name}_clock_max_mhz"] = pynvml.nvmlDeviceGetMaxClockInfo(gpu, clock)
    return {"device": torch.cuda.get_device_name(0), **facts}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _cpu_name() -> str:
    cores = torch.get_num_threads()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, 1 thread" if cores == 1 else f"{name}, {cores} threads"

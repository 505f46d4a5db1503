"""Rows that benchmarks print and keep: one JSON object each, with what is needed to run it again."""

import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """Command, commit, date, device and versions of this run."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else _cpu_name()
    return {
        "command": " ".join([Path(sys.executable).name, *sys.argv]),
        "commit": commit.stdout.strip() or "unknown",
        "date": datetime.date.today().isoformat(),
        "device": device,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write(name: str, rows: list[dict[str, Any]]) -> Path:
    """Keep `rows` as results/NAME.jsonl, each with the environment."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    facts = environment()
    path.write_text("".join(json.dumps({**row, **facts}) + "\n" for row in rows), encoding="utf-8")
    return path


def _cpu_name() -> str:
    cores = torch.get_num_threads()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, {cores} threads"

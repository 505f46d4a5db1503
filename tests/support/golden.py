"""Rows of the printed tables under tests/golden."""

import csv
from pathlib import Path

GOLDEN = Path(__file__).parents[1] / "golden"


def golden_rows(name: str) -> list[dict[str, str]]:
    """All rows of tests/golden/`name`.csv."""
    with (GOLDEN / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def p4d_cells(row: dict[str, str], method: str) -> dict[str, str]:
    """A row of the 4D paper's tables as a case of `memo estimate`."""
    sizes = {name: row[name] for name in ("model", "seq_len", "tp", "cp", "pp", "mbs", "gpus")}
    return {**sizes, "method": method, "hardware": row["gpu"], "gpu_memory_gib": row["gpu_mem_gb"]}


def memo_case(row: dict[str, str]) -> dict[str, str]:
    """A row of MEMO's table 7 that ran, as a case of `memo estimate`; the paper's system is built on Megatron-LM."""
    sizes = {name: row[name] for name in ("tp", "cp", "pp", "gpus", "alpha")}
    length, model = str(int(row["seq_k"]) << 10), f"gpt-{row['model'].lower()}"
    return {
        **sizes,
        "method": "megatron-lm",
        "model": model,
        "seq_len": length,
        "hardware": "a800-80",
        "gpu_memory_gib": "80",
    }

"""Writes files that https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google): complete events ("X") in microseconds, metadata ("M") that names processes and
rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from memo.artifacts import artifact

Event = dict[str, Any]


def process(number: int, name: str, rows: Sequence[str]) -> list[Event]:
    """Events that name a process and its rows, from top to bottom."""
    named: list[tuple[int, str, dict[str, Any]]] = [(0, "process_name", {"name": name})]
    for at, row in enumerate(rows):
        named += [(at, "thread_name", {"name": row}), (at, "thread_sort_index", {"sort_index": at})]
    return [{"ph": "M", "pid": number, "tid": at, "name": what, "args": args} for at, what, args in named]


def complete(
    process: int, row: int, name: str, during_s: tuple[float, float], category: str, args: Mapping[str, int]
) -> Event:
    """An event from time `during_s[0]` to `during_s[1]`."""
    start_s, end_s = during_s
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "pid": process, "tid": row, "name": name, "cat": category, **times, "args": dict(args)}


def write(events: Sequence[Event], path: str | Path) -> None:
    """Write a trace. Raises ArtifactError if the file cannot be written."""
    artifact.write(path, "chrome_trace", 1, {"displayTimeUnit": "ms", "traceEvents": list(events)})

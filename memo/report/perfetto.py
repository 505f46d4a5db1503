"""Spans as a Chrome trace, which https://ui.perfetto.dev and chrome://tracing open.

Format: "Trace Event Format" (Google): complete events ("X") in microseconds, metadata ("M") naming each row.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from memo.artifacts import files
from memo.report.timeline import ROWS, Span, tenancies


def write_perfetto(spans: Sequence[Span], path: str | Path, rank: int = 0) -> None:
    """Rows compute (with its waits), offload and prefetch, then each slot with what it holds.

    The rank is the process of the trace, so traces of several ranks can be opened together.
    Raises ArtifactError when the file cannot be written.
    """
    body = {"displayTimeUnit": "ms", "traceEvents": _events(spans, rank)}
    files.write(path, "chrome_trace", 1, body)


def _events(spans: Sequence[Span], rank: int) -> list[dict[str, Any]]:
    held = tenancies(spans)
    slots = sorted({tenancy.slot for tenancy in held})
    rows = {name: at for at, name in enumerate([*ROWS, *(f"slot {slot}" for slot in slots)])}
    events: list[dict[str, Any]] = [_metadata(rank, 0, "process_name", {"name": f"rank {rank}"})]
    for name, at in rows.items():
        events.append(_metadata(rank, at, "thread_name", {"name": name}))
        events.append(_metadata(rank, at, "thread_sort_index", {"sort_index": at}))
    for span in spans:
        row = rows["compute" if span.row == "wait" else span.row]
        name = f"wait {span.label}" if span.row == "wait" else span.label
        events.append(_complete(rank, row, name, span.row, (span.start_s, span.end_s), _details(span)))
    for tenancy in held:
        microbatch, layer = tenancy.key
        details = {"microbatch": microbatch, "layer": layer}
        during = tenancy.start_s, tenancy.end_s
        events.append(_complete(rank, rows[f"slot {tenancy.slot}"], f"{microbatch}:{layer}", "slot", during, details))
    return events


def _details(span: Span) -> dict[str, int]:
    step = span.step
    details = {"microbatch": step.op.microbatch, "layer": step.op.layer, "slot": step.slot}
    if span.row in ("offload", "prefetch") and step.record is not None:
        details |= {"record": step.record, "bytes": span.num_bytes}
    return details


def _metadata(rank: int, row: int, what: str, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": rank, "tid": row, "name": what, "args": args}


def _complete(
    rank: int, row: int, name: str, category: str, during_s: tuple[float, float], args: dict[str, int]
) -> dict[str, Any]:
    start_s, end_s = during_s
    times = {"ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6}
    return {"ph": "X", "pid": rank, "tid": row, "name": name, "cat": category, **times, "args": args}

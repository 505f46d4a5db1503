"""Spans of a real or a simulated swap plan as a Chrome trace."""

from collections.abc import Sequence
from pathlib import Path

from memo.artifacts import chrome_trace
from memo.report.timeline import ROWS, Span, tenancies


def write_perfetto(spans: Sequence[Span], path: str | Path, rank: int = 0) -> None:
    """Rows compute (with its waits), offload and prefetch, then each slot with what it holds.

    The rank is the process of the trace, so traces of several ranks can be opened together.
    Raises ArtifactError when the file cannot be written.
    """
    chrome_trace.write(_events(spans, rank), path)


def _events(spans: Sequence[Span], rank: int) -> list[chrome_trace.Event]:
    held = tenancies(spans)
    slots = sorted({tenancy.slot for tenancy in held})
    rows = {name: at for at, name in enumerate([*ROWS, *(f"slot {slot}" for slot in slots)])}
    events = chrome_trace.process(rank, f"rank {rank}", list(rows))
    for span in spans:
        row = rows["compute" if span.row == "wait" else span.row]
        name = f"wait {span.label}" if span.row == "wait" else span.label
        during = span.start_s, span.end_s
        events.append(chrome_trace.complete(rank, row, name, during, span.row, _details(span)))
    for tenancy in held:
        microbatch, layer = tenancy.key
        details = {"microbatch": microbatch, "layer": layer}
        during = tenancy.start_s, tenancy.end_s
        row = rows[f"slot {tenancy.slot}"]
        events.append(chrome_trace.complete(rank, row, f"{microbatch}:{layer}", during, "slot", details))
    return events


def _details(span: Span) -> dict[str, int]:
    step = span.step
    details = {"microbatch": step.op.microbatch, "layer": step.op.layer, "slot": step.slot}
    if span.row in ("offload", "prefetch") and step.record is not None:
        details |= {"record": step.record, "bytes": span.num_bytes}
    return details

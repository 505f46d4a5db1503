"""Writes the spans of a real or a simulated step as a Chrome trace."""

from collections.abc import Sequence
from pathlib import Path

from memo.artifacts import chrome_trace
from memo.report.timeline import SwapSpan, rows_of, tenancies
from memo.report.work import AXIS_ROWS, WorkSpan, lanes


def write_perfetto(
    spans: Sequence[SwapSpan], path: str | Path, rank: int = 0, work: Sequence[WorkSpan] | None = None
) -> None:
    """Write rows for compute (with its waits), offload, prefetch and, where anything is on one, a disk; then one for
    each slot with its content.

    `work` is the other work of the rank and its messages; with it there are rows tp, cp, pp and dp before the slots,
    and a second row such as "dp 2" for messages that overlap. The rank is the process of the trace, so that traces of
    several ranks can be opened together. Raises ArtifactError if the file cannot be written.
    """
    axes = {} if work is None else _axis_rows(work)
    names = [
        *rows_of(spans),
        *axes,
        *(f"slot {slot}" for slot in sorted({tenancy.slot for tenancy in tenancies(spans)})),
    ]
    rows = {name: at for at, name in enumerate(names)}
    events = chrome_trace.process(rank, f"rank {rank}", list(rows))
    events += _swap_events(spans, rank, rows)
    for span in work or ():
        if span.row == "compute":
            events.append(_work_event(span, rank, rows["compute"]))
    for name, messages in axes.items():
        for message in messages:
            events.append(_work_event(message, rank, rows[name]))
            if message.stood_still_s:
                since_s = message.end_s - message.stood_still_s
                wait = WorkSpan("wait", f"wait {message.row} {message.name}", since_s, message.end_s)
                events.append(_work_event(wait, rank, rows["compute"]))
    chrome_trace.write(events, path)


def _axis_rows(work: Sequence[WorkSpan]) -> dict[str, list[WorkSpan]]:
    """Messages by the name of their row."""
    found: dict[str, list[WorkSpan]] = {}
    for axis in AXIS_ROWS:
        spread = lanes([span for span in work if span.row == axis]) or [[]]
        found |= {axis if at == 0 else f"{axis} {at + 1}": lane for at, lane in enumerate(spread)}
    return found


def _swap_events(spans: Sequence[SwapSpan], rank: int, rows: dict[str, int]) -> list[chrome_trace.Event]:
    events = []
    for span in spans:
        row = rows["compute" if span.row == "wait" else span.row]
        name = span.label if span.kind == "activations" else f"{span.kind} {span.label}"
        name = f"wait {name}" if span.row == "wait" else name
        during = span.start_s, span.end_s
        events.append(chrome_trace.complete(rank, row, name, during, span.row, _details(span)))
    for tenancy in tenancies(spans):
        details = dict(zip(("microbatch", "layer", "section"), tenancy.key, strict=False))
        during = tenancy.start_s, tenancy.end_s
        row = rows[f"slot {tenancy.slot}"]
        events.append(chrome_trace.complete(rank, row, ":".join(map(str, tenancy.key)), during, "slot", details))
    return events


def _work_event(span: WorkSpan, rank: int, row: int) -> chrome_trace.Event:
    details = {"bytes": span.num_bytes} if span.num_bytes else {}
    return chrome_trace.complete(rank, row, span.name, (span.start_s, span.end_s), span.row, details)


def _details(span: SwapSpan) -> dict[str, int]:
    step = span.step
    details = {"microbatch": step.op.microbatch, "layer": step.op.layer, "slot": step.slot}
    if step.op.section is not None:
        details["section"] = step.op.section
    if span.row in ("offload", "prefetch") and step.record is not None:
        details |= {"record": step.record, "bytes": span.num_bytes}
    return details

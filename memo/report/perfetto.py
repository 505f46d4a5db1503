"""Writes the spans of a real or a simulated step as a Chrome trace."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from memo.artifacts import chrome_trace
from memo.report.timeline import SwapSpan, WorkSpan, rows_of, tenancies

_AXES = ("tp", "cp", "pp", "dp")
"""dp includes reductions over cp x dp; pp includes messages about an embedding that the first and last stage share."""


def write_perfetto(
    spans: Sequence[SwapSpan], path: str | Path, rank: int = 0, work: Sequence[WorkSpan] | None = None
) -> None:
    """Write rows for compute (with its waits), offload, prefetch and, if used, a disk; then a row for the content of
    each slot.

    `work` is the other work of the rank and its messages. It adds rows tp, cp, pp and dp before the slots, and second
    rows such as "dp 2" for messages that overlap. The rank is the process of the trace, so that traces of several ranks
    can be opened together. Raises ArtifactError if the file cannot be written.
    """
    axes, held = {} if work is None else _axis_rows(work), tenancies(spans)
    rows = [*rows_of(spans), *axes, *(f"slot {slot}" for slot in sorted({tenancy.slot for tenancy in held}))]
    events = chrome_trace.process(rank, f"rank {rank}", rows)

    def add(row: str, name: str, during_s: tuple[float, float], category: str, details: Mapping[str, int]) -> None:
        events.append(chrome_trace.complete(rank, rows.index(row), name, during_s, category, details))

    for span in spans:
        name = span.label if span.kind == "activations" else f"{span.kind} {span.label}"
        row, name = ("compute", f"wait {name}") if span.row == "wait" else (span.row, name)
        add(row, name, (span.start_s, span.end_s), span.row, _details(span))
    for tenancy in held:
        details = dict(zip(("microbatch", "layer", "section"), tenancy.key, strict=False))
        during_s = tenancy.start_s, tenancy.end_s
        add(f"slot {tenancy.slot}", ":".join(map(str, tenancy.key)), during_s, "slot", details)
    for place, found in {"compute": [each for each in work or () if each.row == "compute"], **axes}.items():
        for each in found:
            of_message = {"bytes": each.num_bytes} if each.num_bytes else {}
            add(place, each.name, (each.start_s, each.end_s), each.row, of_message)
            if each.stood_still_s:
                stood_s = each.end_s - each.stood_still_s, each.end_s
                add("compute", f"wait {each.row} {each.name}", stood_s, "wait", {})
    chrome_trace.write(events, path)


def _axis_rows(work: Sequence[WorkSpan]) -> dict[str, list[WorkSpan]]:
    """{name of a row: its messages}; each axis has the fewest rows in which its messages do not overlap.

    The greedy algorithm in the order of starts is optimal for intervals.
    """
    found: dict[str, list[WorkSpan]] = {}
    for axis in _AXES:
        lanes: list[list[WorkSpan]] = [[]]
        for span in sorted((each for each in work if each.row == axis), key=lambda each: (each.start_s, each.end_s)):
            free = next((lane for lane in lanes if not lane or lane[-1].end_s <= span.start_s), None)
            if free is None:
                lanes.append([span])
            else:
                free.append(span)
        found |= {axis if at == 0 else f"{axis} {at + 1}": lane for at, lane in enumerate(lanes)}
    return found


def _details(span: SwapSpan) -> dict[str, int]:
    step = span.step
    details = {"microbatch": step.op.microbatch, "layer": step.op.layer, "slot": step.slot}
    if step.op.section is not None:
        details["section"] = step.op.section
    if span.row in ("offload", "prefetch") and step.record is not None:
        details |= {"record": step.record, "bytes": span.num_bytes}
    return details

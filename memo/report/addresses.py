"""Draws a memory plan: blocks by time and address, as in papers on memory planners."""

from collections.abc import Iterator
from pathlib import Path

from memo.artifacts.memory_plan import NATIVE, MemoryPlan
from memo.errors import ArtifactError
from memo.report.drawing import byte_unit, check_suffix, panels, save_figure
from memo.units import format_bytes

_MAX_BOXES = 20_000
"""The most blocks that are drawn, the largest first; a picture cannot show more."""


def draw_addresses(plan: MemoryPlan, path: str | Path, title: str = "") -> None:
    """Draw every planned block as a box: x is the number of requests, y the address, the colour the kind of phase.

    Raises ConfigError if matplotlib is missing or the suffix is unknown, ArtifactError for a plan without the ends of
    blocks, or if the file cannot be written.
    """
    boxes = sorted(_boxes(plan), key=lambda box: box[3], reverse=True)
    if any(requests < 0 for _, _, requests, _, _ in boxes):
        raise ArtifactError("the memory plan does not say when its blocks end: solve the trace again")
    unit, name = byte_unit(plan.arena_bytes)
    check_suffix(path)
    figure, (axes,) = panels(path, 10.0, 4.5)
    for index, kind in enumerate(dict.fromkeys(phase.kind for phase in plan.phases)):
        drawn = [
            (begin, size / unit, max(1, requests), offset / unit)
            for own, begin, requests, size, offset in boxes[:_MAX_BOXES]
            if own == kind
        ]
        if drawn:
            style = {"color": f"C{index % 10}", "edgecolor": "black", "linewidth": 0.1}
            axes.bar(*zip(*drawn, strict=True), align="edge", label=kind, **style)
    axes.axhline(plan.lower_bound_bytes / unit, color="black", linewidth=0.8, linestyle="--")
    axes.set_xlabel(f"requests of at least {format_bytes(plan.min_bytes)} made")
    axes.set_ylabel(f"address, {name} (dashed: most bytes alive at once)")
    left_out = f", the {_MAX_BOXES} largest of {len(boxes)} blocks" if len(boxes) > _MAX_BOXES else ""
    summary = f"{format_bytes(plan.arena_bytes)} reserved, {plan.proof}{left_out}"
    axes.set_title(f"{title}{': ' if title else ''}{summary}", fontsize=9, loc="left")
    if boxes:
        axes.legend(fontsize=7, frameon=False, ncols=4, loc="upper left", bbox_to_anchor=(0, -0.12))
    save_figure(figure, path)


def _boxes(plan: MemoryPlan) -> Iterator[tuple[str, int, int, int, int]]:
    """(kind of phase, begin, requests until its end, bytes, offset) of every block in the arena."""
    made = 0
    for phase in plan.phases:
        for request in phase.requests:
            if request.offset_bytes != NATIVE:
                yield phase.kind, made, request.end - made, request.num_bytes, request.offset_bytes
            made += 1

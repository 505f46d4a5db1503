"""Spans of a rank's work and of its messages."""

from collections.abc import Sequence
from dataclasses import dataclass

AXIS_ROWS = ("tp", "cp", "pp", "dp")
"""dp includes reductions over cp x dp; pp includes messages about an embedding that first and last stage share."""


@dataclass(frozen=True)
class WorkSpan:
    """Work of the rank itself (row "compute"), or a message from its issue until the rank has waited for it.

    Seconds count from the beginning of the recording. A message ends when the rank needs it, which may be later than
    its arrival; `stood_still_s` is the part of that time for which the rank did nothing but wait.
    """

    row: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    stood_still_s: float = 0.0


def lanes(spans: Sequence[WorkSpan]) -> list[list[WorkSpan]]:
    """Spans of one row, distributed over as few lanes as possible, such that those of a lane do not overlap.

    The greedy algorithm in the order of their starts is optimal for intervals.
    """
    found: list[list[WorkSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        free = next((lane for lane in found if lane[-1].end_s <= span.start_s), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found

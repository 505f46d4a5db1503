"""What a rank did and which messages it exchanged, as spans with rows of their own."""

from collections.abc import Sequence
from dataclasses import dataclass

AXIS_ROWS = ("tp", "cp", "pp", "dp")
"""dp: also the reduction over cp x dp. pp: also what ties the first stage's embedding to the last stage."""


@dataclass(frozen=True)
class WorkSpan:
    """Work of the rank itself (row "compute"), or a message from its issue until the rank has waited for it.

    Seconds count from the beginning of the recording. A message ends where the rank needed it, which may be later
    than it arrived; `stood_still_s` is the part of it for which the rank did nothing else.
    """

    row: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    stood_still_s: float = 0.0


def lanes(spans: Sequence[WorkSpan]) -> list[list[WorkSpan]]:
    """Spans of one row, spread over as few lanes as they need: those of a lane do not overlap.

    Greedy over the starts, which is optimal for intervals.
    """
    found: list[list[WorkSpan]] = []
    for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
        free = next((lane for lane in found if lane[-1].end_s <= span.start_s), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found

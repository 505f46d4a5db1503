"""The times at which the steps of a swap plan run, simulated or recorded, and their drawing as text (MEMO, Fig. 11)."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from memo.planner.swap import SwapPlan, SwapStep
from memo.simulate.streams import LayerTimes, StageStreams

Row = Literal["compute", "offload", "prefetch", "write", "read", "wait"]
"""A stream that runs, of which write and read are those of a disk, or the compute stream while it waits for a copy."""

ROWS: tuple[Row, ...] = ("compute", "offload", "prefetch")
DISK_ROWS: tuple[Row, ...] = ("write", "read")

Kind = Literal["activations", "keys and values", "layer inputs", "hidden states"]
"""What is moved: the content of the slots, and beside them what layers that are swept move by plans of its own."""


@dataclass(frozen=True)
class SwapSpan:
    """One operation on one stream, or the wait before it; a prefetch belongs to the backward that it serves.

    `num_bytes`: bytes of a copy, which only recorded spans have (memo.executor.recorder).
    `kind`: of what is copied, or waited for.
    """

    row: Row
    step: SwapStep
    start_s: float
    end_s: float
    num_bytes: int = 0
    kind: Kind = "activations"

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """F0:3 is the forward of microbatch 0 through layer 3; the labels of copies have no letter.

        The number of a section follows that of its layer.
        """
        op = self.step.op
        return f"{op.kind if self.row in ('compute', 'wait') else ''}{':'.join(map(str, self.place))}"

    @property
    def place(self) -> tuple[int, ...]:
        """(microbatch, layer), and the section if there is one."""
        op = self.step.op
        return (op.microbatch, op.layer) if op.section is None else (op.microbatch, op.layer, op.section)


def simulate_swaps(plan: SwapPlan, times: LayerTimes) -> list[SwapSpan]:
    """Simulate a valid plan on the three streams of one stage (memo.simulate.streams).

    Compute runs whenever it need not wait for a copy; messages between pipeline stages are not modelled. Spans are in
    the order of issue.
    """
    streams, spans, free_s = StageStreams(plan, times), list[SwapSpan](), 0.0
    for _ in plan.steps:
        step, start_s, end_s, copies = streams.next_op(0.0)
        if start_s > free_s:
            spans.append(SwapSpan("wait", step, free_s, start_s))
        spans.append(SwapSpan("compute", step, start_s, end_s))
        spans += [SwapSpan(copy.row, copy.step, copy.start_s, copy.end_s) for copy in copies if copy.row != "disk"]
        free_s = end_s
    return spans


def rows_of(spans: Sequence[SwapSpan]) -> list[Row]:
    """Of a drawing: those of the disk where anything is on one."""
    return [*ROWS, *(row for row in DISK_ROWS if any(span.row == row for span in spans))]


def kinds_of(spans: Sequence[SwapSpan]) -> list[Kind]:
    """What is copied, in the order of `Kind`."""
    return [kind for kind in get_args(Kind) if any(span.kind == kind and span.row != "compute" for span in spans)]


def extent_s(spans: Sequence[SwapSpan]) -> tuple[float, float]:
    """When the first span starts, and the seconds from then to the last end; 0 without spans."""
    first_s = min((span.start_s for span in spans), default=0.0)
    return first_s, max((span.end_s for span in spans), default=0.0) - first_s


def stalled_s(spans: Sequence[SwapSpan]) -> float:
    """Seconds for which compute waits for copies."""
    return sum(span.duration_s for span in spans if span.row == "wait")


def copied_s(spans: Sequence[SwapSpan]) -> float:
    """Seconds that the copies of both directions take, together."""
    return sum(span.duration_s for span in spans if span.row in ("offload", "prefetch"))


def hidden_share(spans: Sequence[SwapSpan]) -> float:
    """Share of the time of copies during which a layer computes, 0 to 1; 1 without copies.

    Copies during other work (embedding, loss, optimizer) do not count as hidden, as that work has no spans.
    """
    layers = sorted((span for span in spans if span.row == "compute"), key=lambda span: span.start_s)
    ends_s = [span.end_s for span in layers]
    hidden_s = 0.0
    for copy in spans:
        if copy.row not in ("offload", "prefetch"):
            continue
        at = bisect_right(ends_s, copy.start_s)
        while at < len(layers) and layers[at].start_s < copy.end_s:
            hidden_s += min(copy.end_s, layers[at].end_s) - max(copy.start_s, layers[at].start_s)
            at += 1
    total_s = copied_s(spans)
    return hidden_s / total_s if total_s else 1.0


@dataclass(frozen=True)
class Tenancy:
    """The time for which a slot holds the activations of one layer (or of one section of it) and microbatch."""

    slot: int
    key: tuple[int, ...]  # (microbatch, layer), and the section if there is one
    start_s: float
    end_s: float


def tenancies(spans: Sequence[SwapSpan]) -> list[Tenancy]:
    """The content of all slots over time, from spans in the order of issue.

    Activations enter a slot with their forward or with a prefetch, and leave it at the end of an offload or of their
    backward.
    """
    found: list[Tenancy] = []
    since: dict[int, tuple[tuple[int, ...], float]] = {}
    for span in spans:
        if span.kind != "activations":
            continue
        slot, key, kind = span.step.slot, span.step.op.key, span.step.op.kind
        if span.row == "prefetch" or (span.row == "compute" and kind == "F"):
            since[slot] = key, span.start_s
        leaves = span.row == "offload" or (span.row == "compute" and kind == "B")
        if leaves and slot in since and since[slot][0] == key:
            found.append(Tenancy(slot, key, since.pop(slot)[1], span.end_s))
    return found


def timeline(plan: SwapPlan, times: LayerTimes, width: int = 120) -> str:
    """The drawing of a plan that is simulated on three streams; see `draw_text`."""
    return draw_text(simulate_swaps(plan, times), width)


def draw_text(spans: Sequence[SwapSpan], width: int = 120) -> str:
    """A drawing with a line of `width` columns for each stream; a block begins with `|` and its label if it fits.

    Dots are idle time. The last line has the figures.
    """
    first_s, total_s = extent_s(spans)
    lines = []
    for row in rows_of(spans):
        cells = ["."] * width
        for span in spans:
            if span.row == row and total_s > 0:
                first, end = (round((at_s - first_s) / total_s * width) for at_s in (span.start_s, span.end_s))
                length = end - first
                label = f"|{span.label}"
                cells[first:end] = (label if len(label) <= length else "|").ljust(length, "-")[:length]
        lines.append(f"{row:<9}" + "".join(cells))
    return "\n".join([*lines, summary(spans)])


def summary(spans: Sequence[SwapSpan]) -> str:
    """One line with the time of all spans, the time that compute waits, and the hidden share of the copies."""
    _, total_s = extent_s(spans)
    text = f"{total_s:.3g} s; compute waits {stalled_s(spans):.3g} s for copies"
    if copied_s(spans):
        # Rounded down, so that 100 % means all of it.
        text += f", which take {copied_s(spans):.3g} s, {int(hidden_share(spans) * 100 + 1e-6)} % of it under layers"
    return text

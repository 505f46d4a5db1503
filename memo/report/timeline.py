"""The timeline of a rank: the recorded or simulated steps of a swap plan, other work, and messages."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from memo.planner.swap import SwapStep

Row = Literal["compute", "offload", "prefetch", "write", "read", "wait"]
"""A stream (write and read are a disk's), or the compute stream while it waits for a copy ("wait")."""

ROWS: tuple[Row, ...] = ("compute", "offload", "prefetch")

Kind = Literal["activations", "keys and values", "layer inputs", "hidden states"]
"""The data that a copy moves: the content of slots ("activations"), or data of swept layers with plans of their own."""


@dataclass(frozen=True)
class SwapSpan:
    """One operation on one stream, or the wait before it; a prefetch belongs to the backward that it serves.

    `num_bytes`: bytes of a copy, only in recorded spans (memo.executor.recorder).
    `kind`: the data that is copied or waited for.
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
        """F0:3 is the forward of microbatch 0 through layer 3; labels of copies have no letter.

        The number of a section follows the number of its layer.
        """
        return f"{self.step.op.kind if self.row in ('compute', 'wait') else ''}{':'.join(map(str, self.place))}"

    @property
    def place(self) -> tuple[int, ...]:
        """Microbatch and layer, and the section if there is one."""
        op = self.step.op
        return (op.microbatch, op.layer) if op.section is None else (op.microbatch, op.layer, op.section)


@dataclass(frozen=True)
class WorkSpan:
    """Work of the rank itself (row "compute"), or a message from its issue until the rank has waited for it.

    Seconds count from the beginning of the recording. A message ends when the rank needs it, which may be later than
    its arrival; `stood_still_s` is the part of that time in which the rank only waited.
    """

    row: str
    name: str
    start_s: float
    end_s: float
    num_bytes: int = 0
    stood_still_s: float = 0.0


def rows_of(spans: Sequence[SwapSpan]) -> list[Row]:
    """The rows of a drawing; a disk has rows only if it is used."""
    disk: tuple[Row, ...] = ("write", "read")
    return [*ROWS, *(row for row in disk if any(span.row == row for span in spans))]


def stalled_s(spans: Sequence[SwapSpan]) -> float:
    """Seconds for which compute waits for copies."""
    return sum(span.duration_s for span in spans if span.row == "wait")


def copied_s(spans: Sequence[SwapSpan]) -> float:
    """Seconds that the copies of both directions take, together."""
    return sum(span.duration_s for span in spans if span.row in ("offload", "prefetch"))


def hidden_share(spans: Sequence[SwapSpan]) -> float:
    """Share of the time of copies during which a layer computes, 0 to 1; 1 without copies.

    Copies during other work (embedding, loss, optimizer) do not count as hidden, because such work has no spans.
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

"""When the steps of a swap plan run: a model of three streams, drawn as text (MEMO, Fig. 11)."""

from dataclasses import dataclass
from typing import Literal

from memo.planner.swap import SwapPlan, SwapStep

Row = Literal["compute", "offload", "prefetch"]
ROWS: tuple[Row, ...] = ("compute", "offload", "prefetch")


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one layer: its compute, and the copy of what moves of it in each direction."""

    forward_s: float
    backward_s: float
    offload_s: float
    prefetch_s: float


@dataclass(frozen=True)
class Span:
    """One operation on one stream."""

    row: Row
    step: SwapStep
    start_s: float
    end_s: float


def simulate_swaps(plan: SwapPlan, times: StepTimes) -> list[Span]:
    """Runs a sound plan on three streams that each work in order, under the waits of `memo.executor.swapper`.

    Compute runs whenever it need not wait for a copy; messages between pipeline stages are not modelled.
    """
    free = dict.fromkeys(ROWS, 0.0)
    slot_ready = [0.0] * plan.num_slots  # end of the last copy out of or into it
    record_ready = [0.0] * plan.num_records
    spans: list[Span] = []

    def run(row: Row, step: SwapStep, ready_s: float, duration_s: float) -> float:
        start_s = max(free[row], ready_s)
        free[row] = start_s + duration_s
        spans.append(Span(row, step, start_s, free[row]))
        return free[row]

    for step in plan.steps:
        duration_s = times.forward_s if step.op.kind == "F" else times.backward_s
        computed_s = run("compute", step, slot_ready[step.slot], duration_s)
        if step.offload:
            assert step.record is not None
            done_s = run("offload", step, max(computed_s, record_ready[step.record]), times.offload_s)
            slot_ready[step.slot] = record_ready[step.record] = done_s
        if step.next_prefetch is not None:
            target = plan.steps[step.next_prefetch]
            assert target.record is not None
            ready_s = max(computed_s, slot_ready[step.slot], record_ready[target.record])
            done_s = run("prefetch", target, ready_s, times.prefetch_s)
            slot_ready[step.slot] = record_ready[target.record] = done_s
    return spans


def stalled_s(spans: list[Span]) -> float:
    """Seconds for which compute waits for copies."""
    compute = [span for span in spans if span.row == "compute"]
    busy_s = sum(span.end_s - span.start_s for span in compute)
    return max((span.end_s for span in compute), default=0.0) - busy_s


def timeline(plan: SwapPlan, times: StepTimes, width: int = 120) -> str:
    """One line a stream, `width` columns of time; a block begins with `|` and, where it fits, its layer.

    F0:3 is the forward of microbatch 0 through layer 3; dots are idle time.
    """
    spans = simulate_swaps(plan, times)
    total_s = max((span.end_s for span in spans), default=0.0)
    lines = []
    for row in ROWS:
        cells = ["."] * width
        for span in spans:
            if span.row == row and total_s > 0:
                first, end = (round(at_s / total_s * width) for at_s in (span.start_s, span.end_s))
                op = span.step.op
                label = f"|{op.kind if row == 'compute' else ''}{op.microbatch}:{op.layer}"
                length = end - first
                cells[first:end] = (label if len(label) <= length else "|").ljust(length, "-")[:length]
        lines.append(f"{row:<9}" + "".join(cells))
    lines.append(f"{total_s:.3g} s; compute waits {stalled_s(spans):.3g} s for copies")
    return "\n".join(lines)

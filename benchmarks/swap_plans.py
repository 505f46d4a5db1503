"""Swap plans without a run: the data that each stage of a pipeline moves, and when, from four numbers of a layer.

docs/swapping.md shows their output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memo.planner.swap import SwapPlan, swap_plan
from memo.planner.swap_validator import validate
from memo.report.timeline import SwapSpan
from memo.simulate.streams import LayerTimes, StageStreams
from memo.spec.layer_ops import layer_ops
from memo.spec.schedule import Pipeline, most_in_flight, one_f_one_b
from memo.text_table import text_table
from memo.units import format_bytes


@dataclass(frozen=True)
class StageSwaps:
    """One stage of a pipeline in one training step.

    Attributes:
        in_flight: the most microbatches, over all chunks of the stage, that wait for their backward.
        plan: the validated swap plan of the stage.
    """

    stage: int
    in_flight: int
    plan: SwapPlan

    @property
    def num_passes(self) -> int:
        """Number of forwards of layers: layers x microbatches."""
        return sum(step.op.kind == "F" for step in self.plan.steps)


def plan_stages(pipeline: Pipeline, num_layers: int) -> list[StageSwaps]:
    """Make the swap plans of all stages under (interleaved) 1F1B and check that they can run.

    The validator replays each plan. Copies cannot add a deadlock: a copy waits only for what its own stage issued
    before it, and compute only for copies that were issued before.

    Raises PlanError for a plan that is wrong or for layers that do not divide evenly.
    """
    schedules = [one_f_one_b(pipeline, stage) for stage in range(pipeline.stages)]
    stages = []
    for stage, actions in enumerate(schedules):
        plan = swap_plan(layer_ops(pipeline, stage, num_layers, actions))
        validate(plan)
        stages.append(StageSwaps(stage, most_in_flight(pipeline, stage), plan))
    return stages


def stage_table(stages: Sequence[StageSwaps], record_bytes: int | None = None) -> str:
    """Return a table with a line for each stage; with the bytes of a host record it has the host memory of a rank."""
    head = ["stage", "in flight", "passes", "offloads", "resident", "records"]
    rows = [head + (["host memory"] if record_bytes is not None else [])]
    for stage in stages:
        plan = stage.plan
        num_resident = sum(step.op.kind == "B" and not step.prefetch for step in plan.steps)  # still in their slot
        counts = (stage.stage, stage.in_flight, stage.num_passes, plan.num_offloads, num_resident)
        row = [str(count) for count in (*counts, plan.num_records)]
        rows.append(row + ([format_bytes(plan.num_records * record_bytes)] if record_bytes is not None else []))
    return text_table(rows, left=())


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

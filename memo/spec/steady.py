"""The steady phase of a pipeline: more microbatches only repeat it, so a shortened pipeline answers for all of them."""

from dataclasses import replace

from memo.spec.clock import Clock, program
from memo.spec.schedule import Pipeline


def steady_microbatches(pipeline: Pipeline) -> int:
    """Microbatches after which more of them only repeat the steady phase."""
    is_interleaved = pipeline.chunks > 1 and not pipeline.breadth_first
    return min(pipeline.microbatches, 3 * pipeline.stages if is_interleaved else 2 * pipeline.stages + 2)


def shortened(pipeline: Pipeline) -> Pipeline:
    """The same pipeline with only as many microbatches as the steady phase takes to show."""
    return replace(pipeline, microbatches=steady_microbatches(pipeline))


def repeats_after(pipeline: Pipeline) -> int:
    """Microbatches of one period of the steady phase: their layer operations come in the same order again."""
    return pipeline.stages if pipeline.chunks > 1 else 1


def steady_period_s(pipeline: Pipeline, clock: Clock, skip: int = 0) -> float:
    """Seconds that one more microbatch takes, from the last backwards of the steady phase on stage 0.

    `skip` leaves the last ones out: on one stage the very last microbatch is among them, whose gradients are reduced.
    `clock` is a run of `steady_microbatches(pipeline)`, of which there are more than two a stage.
    """
    ops = program(pipeline).stages[0]
    last_forward = max(index for index, op in enumerate(ops) if op.action.kind == "F")
    ends = [
        end
        for op, end in zip(ops[: last_forward + 2], clock.ends[0], strict=False)
        if op.action.kind == "B" and op.action.chunk == 0
    ]
    # Interleaved schedules repeat every `stages` microbatches; two slots may make others repeat every second one.
    step = pipeline.stages if pipeline.chunks > 1 else 2
    last = -1 - skip
    return (ends[last] - ends[last - step]) / step

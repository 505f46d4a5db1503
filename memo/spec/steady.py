"""The steady phase of a pipeline. More microbatches only repeat it, so a shortened pipeline answers for any number of
them."""

from collections.abc import Callable

from memo.spec.clock import Clock
from memo.spec.schedule import Pipeline


def steady_microbatches(pipeline: Pipeline) -> int:
    """Microbatches of a pipeline that shows its steady phase; more of them only repeat it."""
    is_interleaved = pipeline.chunks > 1 and not pipeline.breadth_first
    return min(pipeline.microbatches, 3 * pipeline.stages if is_interleaved else 2 * pipeline.stages + 2)


def shortened(pipeline: Pipeline) -> Pipeline:
    """The pipeline with only as many microbatches as show its steady phase."""
    return pipeline._replace(microbatches=steady_microbatches(pipeline))


def repeats_after(pipeline: Pipeline) -> int:
    """Microbatches of one period of the steady phase, after which layer operations come in the same order again."""
    return pipeline.stages if pipeline.chunks > 1 else 1


def of_all_microbatches(
    pipeline: Pipeline, least: int, count: Callable[[Pipeline], tuple[int, ...]]
) -> tuple[int, ...]:
    """The result of `count` for a pipeline, although it is called for shortened pipelines alone.

    Each period of the steady phase adds the same to every count, so two shortened pipelines tell what a period adds:

        microbatches    | fill | .. | period | period | period | drain |
        counted         | fill | .. | period |                 | drain |    and twice what one period adds

    Args:
        least: least microbatches of a shortened pipeline, if the pipeline has as many. A pipeline with one period less
            is counted too, and must show the same steady phase.
    """
    period = repeats_after(pipeline)
    periods = max(0, pipeline.microbatches - least) // period
    short = pipeline._replace(microbatches=pipeline.microbatches - periods * period)
    found = count(short)
    if not periods:
        return found
    fewer = count(short._replace(microbatches=short.microbatches - period))
    return tuple(number + periods * (number - less) for number, less in zip(found, fewer, strict=True))


def steady_period_s(pipeline: Pipeline, clock: Clock, skip: int = 0) -> float:
    """Seconds that one more microbatch takes, from the last backwards of the steady phase on stage 0.

    `skip` leaves out the last ones: on a single stage they include the very last microbatch, whose gradients are
    reduced. `clock` is a run of `steady_microbatches(pipeline)`, which must be more than two a stage.
    """
    acted = [
        (op.action, end)
        for op, end in zip(clock.program.stages[0], clock.ends[0], strict=True)
        if op.action is not None
    ]
    last_forward = max(index for index, (action, _) in enumerate(acted) if action.kind == "F")
    ends = [end for action, end in acted[: last_forward + 2] if action.kind == "B" and action.chunk == 0]
    # Interleaved schedules repeat every `stages` microbatches; with two slots others may repeat every second one.
    step = pipeline.stages if pipeline.chunks > 1 else 2
    last = -1 - skip
    return (ends[last] - ends[last - step]) / step

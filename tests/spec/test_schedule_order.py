"""1F1B and interleaved 1F1B as data: complete, in order, and as lean as the formulas say."""

from collections import Counter

import pytest
from schedules import simulate

from memo.spec.schedule import Action, Pipeline, forward_only, one_f_one_b

PLAIN = [Pipeline(p, 1, m) for p in range(1, 9) for m in (1, 2, 3, p, p + 1, 2 * p + 3, 32)]
INTERLEAVED = [Pipeline(p, v, p * k) for p in range(2, 9) for v in (2, 3) for k in (1, 2, 3, 5)]
PIPELINES = sorted({*PLAIN, *INTERLEAVED}, key=str)


def schedules_of(pipeline: Pipeline) -> list[list[Action]]:
    return [one_f_one_b(pipeline, stage) for stage in range(pipeline.stages)]


def expected_peak(pipeline: Pipeline, stage: int) -> int:
    """Forwards of the warm-up and the one of the first 1F1B pair (Narayanan et al., 2021, section 2.2)."""
    p, v, m = pipeline.stages, pipeline.chunks, pipeline.microbatches
    if v == 1:
        return min(m, p - stage)
    return min(m * v, 2 * (p - stage - 1) + (v - 1) * p + 1)


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_schedule_is_complete_in_order_and_free_of_deadlock(pipeline: Pipeline) -> None:
    schedules = schedules_of(pipeline)
    count, chunks = pipeline.microbatches, pipeline.chunks
    every = [Action(kind, m, c) for kind in ("F", "B") for m in range(count) for c in range(chunks)]
    for actions in schedules:
        assert Counter(actions) == Counter(every)
        position = {action: index for index, action in enumerate(actions)}
        for action in every[: count * chunks]:
            assert position[action] < position[Action("B", action.microbatch, action.chunk)]
    peaks = [expected_peak(pipeline, stage) for stage in range(pipeline.stages)]
    assert simulate(pipeline, schedules) == peaks


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_forward_only_is_free_of_deadlock(pipeline: Pipeline) -> None:
    schedules = [forward_only(pipeline)] * pipeline.stages
    assert simulate(pipeline, schedules) == [pipeline.microbatches * pipeline.chunks] * pipeline.stages


@pytest.mark.parametrize("pipeline", [Pipeline(1, 1, 2), Pipeline(3, 1, 2), Pipeline(2, 3, 4)], ids=str)
def test_sources_and_targets_are_inverse_and_layers_are_dealt_out_once(pipeline: Pipeline) -> None:
    ends = Counter()
    for stage, actions in enumerate(schedules_of(pipeline)):
        for action in actions:
            target = pipeline.target(stage, action)
            if target is None:
                ends[action.kind] += 1
            else:
                assert pipeline.source(*target) == (stage, action)
    assert ends == {"F": pipeline.microbatches, "B": pipeline.microbatches}
    virtual = [(stage, chunk) for chunk in range(pipeline.chunks) for stage in range(pipeline.stages)]
    layers = [layer for stage, chunk in virtual for layer in pipeline.layers(stage, chunk, 12)]
    assert layers == list(range(12))


GOLDEN = [
    "F0 F1 F0.1 F1.1 F2 B0.1 F3 B1.1 F2.1 B0 F3.1 B1 B2.1 B3.1 B2 B3",
    "F0 F1 F0.1 B0.1 F1.1 B1.1 F2 B0 F3 B1 F2.1 B2.1 F3.1 B3.1 B2 B3",
]


def test_printed_schedule_of_two_stages_two_chunks_four_microbatches() -> None:
    assert [" ".join(map(str, actions)) for actions in schedules_of(Pipeline(2, 2, 4))] == GOLDEN

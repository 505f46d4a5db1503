"""The order in which hidden states of swept layers are written and read, replayed module by module."""

import pytest

from memo.planner.swap import swap_plan
from memo.planner.swap_validator import validate
from memo.spec.hidden_ops import HiddenOps, most_hidden_states, stage_hidden_ops
from memo.spec.layer_ops import LayerOp
from memo.spec.schedule import Pipeline


def most_waiting(moves: list[LayerOp]) -> int:
    """How many sections wait at once to be read; each is written before that, and read once."""
    waiting: set[tuple[object, ...]] = set()
    most = 0
    for op in moves:
        assert (op.key in waiting) == (op.kind == "B")
        waiting ^= {op.key}
        most = max(most, len(waiting))
    assert not waiting
    return most


def test_one_layer_of_two_sections_by_hand() -> None:
    """Embedding, layer, loss, layer backward from the last section on, embedding backward."""
    moves = stage_hidden_ops(Pipeline(1, 1, 1), 0, 1, 2).training
    assert [f"{op.kind}{op.layer}.{op.section}" for op in moves] == [
        *("F0.0", "F0.1"),
        *("B0.0", "F1.0", "B0.1", "F1.1"),
        *("B1.0", "F2.0", "B1.1", "F2.1"),
        *("B2.1", "F3.1", "B2.0", "F3.0"),
        *("B3.0", "B3.1"),
    ]


@pytest.mark.parametrize("is_breadth_first", [False, True])
@pytest.mark.parametrize(("microbatches", "layers", "sections"), [(1, 1, 1), (2, 3, 4), (3, 2, 5)])
def test_what_is_written_is_read_once(microbatches: int, layers: int, sections: int, is_breadth_first: bool) -> None:
    """By the next module of the same microbatch; host memory holds what waits, and no more."""
    pipeline = Pipeline(1, layers, microbatches, True) if is_breadth_first else Pipeline(1, 1, microbatches)
    moves = stage_hidden_ops(pipeline, 0, layers, sections).training
    most = most_waiting(moves)
    assert len(moves) == 2 * microbatches * (2 * layers + 2) * sections
    assert most == sections * (microbatches if is_breadth_first else 1) == sections * most_hidden_states(pipeline, 0)
    plan = swap_plan(moves)
    validate(plan)
    assert plan.num_records <= most - 1


def test_an_evaluation_reads_the_last_hidden_states_once() -> None:
    """Of one microbatch after the other, also where training goes breadth first."""
    for pipeline in (Pipeline(1, 1, 2), Pipeline(1, 3, 2, breadth_first=True)):
        moves = stage_hidden_ops(pipeline, 0, 3, 4).evaluation
        one = [place for place in range(4) for _ in range(4)]
        assert [op.layer for op in moves if op.kind == "B"] == one * 2
        assert [op.microbatch for op in moves] == [0] * 32 + [1] * 32


def test_two_stages_by_hand() -> None:
    """1F1B of two microbatches through two layers of one section. "F0.1": of microbatch 0, written for the second time.

    Stage 0 sends what its layer has written ("B0.1"), and receives the gradient ("F0.4"); stage 1 the other way round.
    """
    found = [
        " ".join(f"{op.kind}{op.microbatch}.{op.layer}" for op in stage_hidden_ops(Pipeline(2, 1, 2), stage, 2, 1)[0])
        for stage in (0, 1)
    ]
    assert found == [
        "F0.0 B0.0 F0.1 B0.1 F1.0 B1.0 F1.1 B1.1 F0.4 B0.4 F0.5 B0.5 F1.4 B1.4 F1.5 B1.5",
        "F0.1 B0.1 F0.2 B0.2 F0.3 B0.3 F0.4 F1.1 B0.4 B1.1 F1.2 B1.2 F1.3 B1.3 F1.4 B1.4",
    ]
    assert [most_hidden_states(Pipeline(2, 1, 2), stage) for stage in (0, 1)] == [1, 2]


@pytest.mark.parametrize(
    "pipeline",
    [
        *(Pipeline(1, 1, 3), Pipeline(3, 1, 1), Pipeline(3, 1, 40), Pipeline(5, 1, 4)),
        *(Pipeline(2, 2, 2), Pipeline(2, 2, 16), Pipeline(3, 2, 12), Pipeline(4, 3, 4), Pipeline(4, 3, 24)),
        *(Pipeline(2, 5, 6), Pipeline(5, 2, 5), Pipeline(5, 3, 25)),
    ],
)
def test_more_microbatches_hold_no_more(pipeline: Pipeline) -> None:
    """Each stage holds at most three hidden states, written and read once each, as a shorter pipeline tells."""
    for stage in range(pipeline.stages):
        both: HiddenOps = stage_hidden_ops(pipeline, stage, pipeline.stages * pipeline.chunks, 1)
        peaks = [most_waiting(moves) for moves in both]
        assert max(peaks) == peaks[0] == most_hidden_states(pipeline, stage) <= 3

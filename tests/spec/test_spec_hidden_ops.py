"""The order in which hidden states of swept layers are written and read, replayed module by module."""

import pytest

from memo.planner.swap import swap_plan
from memo.planner.swap_validator import validate
from memo.spec.layer_ops import LayerOp, hidden_ops, layer_ops, stage_ops
from memo.spec.schedule import Pipeline, forward_only


def test_one_layer_of_two_sections_by_hand() -> None:
    """Embedding, layer, loss forward and backward, layer backward from the last section on, embedding backward."""
    moves = hidden_ops([LayerOp("F", 0, 0), LayerOp("B", 0, 0)], 2, 1)
    assert [f"{op.kind}{op.layer}.{op.section}" for op in moves] == [
        *("F0.0", "F0.1"),
        *("B0.0", "F1.0", "B0.1", "F1.1"),
        *("B1.0", "F2.0", "B1.1", "F2.1"),
        *("B2.0", "F3.0", "B2.1", "F3.1"),
        *("B3.1", "F4.1", "B3.0", "F4.0"),
        *("B4.0", "B4.1"),
    ]


@pytest.mark.parametrize("is_breadth_first", [False, True])
@pytest.mark.parametrize(("microbatches", "layers", "sections"), [(1, 1, 1), (2, 3, 4), (3, 2, 5)])
def test_what_is_written_is_read_once(microbatches: int, layers: int, sections: int, is_breadth_first: bool) -> None:
    """By the next module of the same microbatch; host memory holds what waits, and no more."""
    pipeline = Pipeline(1, layers, microbatches, True) if is_breadth_first else Pipeline(1, 1, microbatches)
    moves = hidden_ops(stage_ops(pipeline, 0, layers), sections, layers)
    waiting: set[tuple[object, ...]] = set()
    most = 0
    for op in moves:
        assert (op.key in waiting) == (op.kind == "B")
        waiting ^= {op.key}
        most = max(most, len(waiting))
    assert not waiting and len(moves) == 2 * microbatches * (2 * layers + 3) * sections
    assert most == sections * (microbatches if is_breadth_first else 1)
    plan = swap_plan(moves)
    validate(plan)
    assert plan.num_records <= most - 1


def test_an_evaluation_reads_the_last_hidden_states_once() -> None:
    forwards = layer_ops(Pipeline(1, 1, 1), 0, 3, forward_only(Pipeline(1, 1, 1), 0))
    moves = hidden_ops(forwards, 4, 3)
    assert [op.layer for op in moves if op.kind == "B"] == [place for place in range(4) for _ in range(4)]
    assert len(moves) == 2 * 4 * 4

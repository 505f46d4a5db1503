"""Rendezvous of stages: played against each other they end, and pipelines run as fast as without them."""

from itertools import product

import pytest

from memo.errors import ScheduleError
from memo.spec.clock import Op, Program, program, run
from memo.spec.rendezvous import Item, Rendezvous, items_in_evaluation, items_in_training, rendezvous_program
from memo.spec.schedule import Action, Pipeline, forward_only, one_f_one_b

PIPELINES = [
    *(Pipeline(stages, 1, count) for stages in (1, 2, 3, 4, 8) for count in (1, 2, 3, stages, 2 * stages + 1)),
    *(Pipeline(stages, chunks, rounds * stages) for stages, chunks, rounds in product((2, 3, 4, 8), (2, 3), (1, 2, 4))),
]


def thrice(stage: int, op: Op, ready_s: float) -> float:
    return ready_s + (1.0 if op.executed_action.kind == "F" else 2.0)


def played(items: list[list[Item]]) -> set[Rendezvous]:
    """Every stage goes through its items, and stops at a rendezvous until the other one is there."""
    done: set[Rendezvous] = set()
    while any(items):
        ahead = {stage: each[0] for stage, each in enumerate(items) if each}
        ready = [stage for stage, item in ahead.items() if isinstance(item, Action)]
        for item in ahead.values():
            if isinstance(item, Rendezvous) and ahead.get(item.source) == item == ahead.get(item.target):
                ready += [item.source, item.target]
                done.add(item)
        assert ready, f"all stages wait: {ahead}"
        for stage in set(ready):
            items[stage].pop(0)
    return done


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_no_stage_waits_for_ever(pipeline: Pipeline) -> None:
    """Actions keep their order, and each message has its place after the one that sends and before the other."""
    stages = range(pipeline.stages)
    training = [one_f_one_b(pipeline, stage) for stage in stages]
    evaluation = [forward_only(pipeline) for _ in stages]
    for found, schedules in ((items_in_training, training), (items_in_evaluation, evaluation)):
        items = [list(each) for each in found(pipeline)]
        for stage, each in enumerate(items):
            assert [item for item in each if isinstance(item, Action)] == schedules[stage]
            for place, item in enumerate(each):
                if isinstance(item, Rendezvous):
                    assert each.index(item.sent) < place if item.source == stage else place < each.index(item.awaited)
                    assert pipeline.target(item.source, item.sent) == (item.target, item.awaited)
        num_sent = (
            sum(
                pipeline.target(stage, one) is not None
                for stage in range(pipeline.stages)
                for one in items[stage]
                if isinstance(one, Action)
            )
            if pipeline.stages > 1
            else 0
        )
        assert len(played(items)) == num_sent


@pytest.mark.parametrize("pipeline", PIPELINES, ids=str)
def test_stages_seldom_wait_for_each_other(pipeline: Pipeline) -> None:
    """Where messages take no time, 1F1B is as fast as with messages beside its actions; interleaved at most a fifth
    slower."""
    met, beside = run(rendezvous_program(pipeline), thrice, 0.0), run(program(pipeline), thrice, 0.0)
    slower = met.makespan_s / beside.makespan_s
    assert slower == pytest.approx(1.0) if pipeline.chunks == 1 else 1.0 <= slower <= 1.21


def test_both_stages_stop_for_a_message() -> None:
    """Of 1F1B's four messages each takes its time on both stages, one after the other where two pass each other."""
    clock = run(rendezvous_program(Pipeline(2, 1, 2)), thrice, message_s=0.5)
    assert clock.ends[0] == pytest.approx([1.0, 1.5, 2.5, 5.0, 5.5, 7.5, 9.0, 11.0])


def test_the_clock_tells_a_deadlock() -> None:
    """Two stages that both send first: beside actions that is no fault, in a rendezvous it is one."""
    sends, awaits = Op(None, -1, 0, 0), Op(None, 0, -1, -1)
    other = Op(None, -1, 1, 1), Op(None, 1, -1, -1)
    stages = ((sends, other[1]), (other[0], awaits))
    with pytest.raises(ScheduleError, match="the schedule deadlocks"):
        run(Program(stages, num_messages=2, num_links=2, has_rendezvous=True), thrice, message_s=0.0)

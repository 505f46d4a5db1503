"""The clock of the pipeline against textbooks, and the shortened run against the full one."""

import pytest

from memo.errors import ScheduleError
from memo.spec.clock import Op, Program, program, run
from memo.spec.schedule import Action, Pipeline
from memo.spec.steady import shortened, steady_period_s

FORWARD_S, BACKWARD_S = 1.0, 2.0


def uniform(stage: int, op: Op, ready_s: float) -> float:
    return ready_s + (FORWARD_S if op.executed_action.kind == "F" else BACKWARD_S)


def uneven(stage: int, op: Op, ready_s: float) -> float:
    """The first and the last stage have more to do, as embedding and loss make it."""
    base = 1.0 + (0.3 if stage == 0 else 0.0) + 0.07 * stage * stage + 0.2 * op.executed_action.chunk
    return ready_s + base * (1.0 if op.executed_action.kind == "F" else 2.1)


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("microbatches", [1, 2, 7, 16])
def test_bubble_of_1f1b_is_the_textbook_one(stages: int, microbatches: int) -> None:
    """Narayanan et al., 2021, section 2.2: (p - 1) of m + p - 1 slots are idle on every stage."""
    clock = run(program(Pipeline(stages, 1, microbatches)), uniform, message_s=0.0)
    assert clock.makespan_s == pytest.approx((microbatches + stages - 1) * (FORWARD_S + BACKWARD_S))
    idle = 1 - microbatches * (FORWARD_S + BACKWARD_S) / clock.makespan_s
    assert idle == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 4), (4, 2, 8), (4, 3, 16), (8, 2, 8)])
def test_bubble_shrinks_with_interleaving(stages: int, chunks: int, microbatches: int) -> None:
    """Narayanan et al., 2021, section 2.2: the bubble is (p - 1) / v microbatches long."""
    pipeline = Pipeline(stages, chunks, microbatches)
    clock = run(program(pipeline), uniform, message_s=0.0)
    chunk_s = FORWARD_S + BACKWARD_S
    assert clock.makespan_s == pytest.approx((microbatches * chunks + stages - 1) * chunk_s)


def test_messages_take_time_and_wait_for_their_receiver() -> None:
    """One microbatch: every message is on the critical path, 2 (p - 1) of them."""
    clock = run(program(Pipeline(4, 1, 1)), uniform, message_s=0.25)
    assert clock.makespan_s == pytest.approx(4 * 3.0 + 6 * 0.25)


@pytest.mark.parametrize("sends", [0, 1])
def test_a_stage_runs_no_further_ahead_than_receives_are_posted(sends: int) -> None:
    """Two stages, 0.5 s a message. The slow one posts a receive when it begins the operation before it:

    sender    | 0 | 1 | 2 | 3 | . waits for message 2 . | 4 |
    receiver    . | 0 -- 10 s -- | posts 2 here, so it arrives at 12
    """
    sender = tuple(Op(Action("F", i, 0), receives=-1, sends=i if i < 4 else -1, link=0) for i in range(5))
    receiver = tuple(Op(Action("F", i, 0), receives=i, sends=-1, link=-1) for i in range(4))

    def execute(stage: int, op: Op, ready_s: float) -> float:
        return ready_s + (1.0 if stage == sends else 10.0)

    stages = (sender, receiver) if sends == 0 else (receiver, sender)
    clock = run(Program(stages, num_messages=4, num_links=1), execute, message_s=0.5)
    assert clock.ends[sends] == pytest.approx([1.0, 2.0, 3.0, 4.0, 13.0])
    assert clock.ends[1 - sends] == pytest.approx([11.5, 21.5, 31.5, 41.5])


@pytest.mark.parametrize("stages", [1, 2, 4, 8])
@pytest.mark.parametrize("message_s", [0.0, 0.4])
def test_shortened_run_foretells_the_full_one(stages: int, message_s: float) -> None:
    for chunks in (1, 2) if stages > 1 else (1,):
        full = Pipeline(stages, chunks, 64)
        short = shortened(full)
        assert short.microbatches < full.microbatches
        clock = run(program(short), uneven, message_s)
        foretold = clock.makespan_s + (64 - short.microbatches) * steady_period_s(short, clock)
        true = run(program(full), uneven, message_s).makespan_s
        assert foretold == pytest.approx(true, rel=0.002)


def test_a_program_that_waits_for_ever_is_named() -> None:
    awaits = Op(Action("F", 0, 0), receives=0, sends=-1, link=-1)
    with pytest.raises(ScheduleError, match="the schedule deadlocks: stage 0 at F0"):
        run(Program(((awaits,),), num_messages=1, num_links=0), uniform, message_s=0.0)


def test_clock_of_nothing_but_one_stage() -> None:
    clock = run(program(Pipeline(1, 1, 2)), uniform, message_s=9.0)
    assert clock.ends == [[1.0, 3.0, 4.0, 6.0]]

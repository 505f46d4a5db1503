"""Checks that the runtime can run a schedule: it has every action once, in an order in which nothing waits for ever."""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from itertools import accumulate

from memo.errors import ScheduleError
from memo.spec.clock import Program, program_of, run
from memo.spec.schedule import Action, Kind, Pipeline


def simulate(pipeline: Pipeline, schedules: Sequence[Sequence[Action]]) -> list[int]:
    """Run the schedules against each other and return the peak of in-flight microbatches per stage.

    Raises ScheduleError when no stage can go on, when messages of one link would arrive in another
    order than they are awaited, when an action is missing or repeated, or stands before one of its own stage
    whose result it needs.
    """
    _check_complete(pipeline, schedules)
    _check_own_order(pipeline, schedules)
    given = program_of(pipeline, schedules)
    _check_message_order(given)
    run(given, lambda stage, op, ready_s: ready_s, message_s=0.0)
    return [max(accumulate(1 if action.kind == "F" else -1 for action in actions)) for actions in schedules]


def _check_complete(pipeline: Pipeline, schedules: Sequence[Sequence[Action]]) -> None:
    kinds: list[Kind] = sorted({action.kind for actions in schedules for action in actions}, reverse=True)
    expected = Counter(
        Action(kind, m, c) for kind in kinds for m in range(pipeline.microbatches) for c in range(pipeline.chunks)
    )
    for stage, actions in enumerate(schedules):
        if Counter(actions) != expected:
            wrong = (Counter(actions) - expected) + (expected - Counter(actions))
            names = ", ".join(sorted(str(action) for action in wrong))
            raise ScheduleError(f"stage {stage}: actions missing or repeated: {names}")


def _check_own_order(pipeline: Pipeline, schedules: Sequence[Sequence[Action]]) -> None:
    """Check the order of actions of a stage that depend on each other without a message, which the clock would miss.

    These are the forward before its backward and, on a single stage, an action before that of the next chunk.
    """
    for stage, actions in enumerate(schedules):
        done: set[tuple[Kind, int, int]] = set()
        for action in actions:
            needed: list[tuple[Kind, int, int]] = [("F", action.microbatch, action.chunk)] if action.kind == "B" else []
            source = pipeline.source(stage, action) if pipeline.stages == 1 else None
            if source is not None:
                needed.append((source[1].kind, source[1].microbatch, source[1].chunk))
            for before in needed:
                if before not in done:
                    raise ScheduleError(f"stage {stage}: {action} stands before {Action(*before)}")
            done.add((action.kind, action.microbatch, action.chunk))


def _check_message_order(program: Program) -> None:
    """Check that messages are awaited in the order in which they are sent, because a link keeps their order."""
    sent: dict[int, deque[int]] = defaultdict(deque)  # by link; each link has one sender and one receiver
    link_of_message: dict[int, int] = {}
    awaited: dict[int, Action] = {}
    for ops in program.stages:
        for op in ops:
            awaited[op.receives] = op.executed_action
            if op.sends >= 0:
                sent[op.link].append(op.sends)
                link_of_message[op.sends] = op.link
    for at_once in zip(*program.stages, strict=True):  # names the earliest fault, not a consequence of it
        for stage, op in enumerate(at_once):
            if op.receives >= 0:
                first = sent[link_of_message[op.receives]].popleft()
                if first != op.receives:
                    raise ScheduleError(
                        f"stage {stage} awaits the input of {op.action}, but {awaited[first]} was sent first"
                    )

"""Messages for which two stages stop between their actions: those of hidden states in host memory; no torch.

A message of many sections passes through one section of device memory on either side, so it cannot wait there until the
other stage has time. Both stages take part in it at the same time, section after section, from host records into host
records.

    stage 0  | F0 | F1 -- M -- B0 ...          M: the gradient that B0 needs
    stage 1       | F0 | B0 M F1 ...

The clock of the schedule with whole messages (memo.spec.clock) decides where rendezvous stand among a stage's actions.
A rendezvous is placed between the action that sends and the action that awaits, at the time at which the two stages
wait least for each other; of several such times it is the last. All lists are sorted by that time, and rendezvous stand
before the actions that begin then. So the earliest rendezvous or action that is not done yet can always be done: no
schedule deadlocks.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from memo.spec.clock import Op, Program, program_of, run
from memo.spec.schedule import Action, Pipeline, forward_only, link_of, stage_actions

_DURATION = {"F": 1.0, "B": 2.0}
"""Durations of actions with which rendezvous are placed: a backward has twice the products of a forward. No result
depends on them."""


class Rendezvous(NamedTuple):
    """One message: the output of action `sent` on stage `source`, which action `awaited` needs on stage `target`."""

    source: int
    sent: Action
    target: int
    awaited: Action


Item = Action | Rendezvous


@lru_cache(maxsize=64)
def items_in_training(pipeline: Pipeline) -> tuple[tuple[Item, ...], ...]:
    """The actions and rendezvous of each stage in one training step, in order."""
    return with_rendezvous(pipeline, [stage_actions(pipeline, stage) for stage in range(pipeline.stages)])


@lru_cache(maxsize=64)
def items_in_evaluation(pipeline: Pipeline) -> tuple[tuple[Item, ...], ...]:
    """The actions and rendezvous of each stage in an evaluation, which runs forwards only."""
    return with_rendezvous(pipeline, [forward_only(pipeline)] * pipeline.stages)


def with_rendezvous(pipeline: Pipeline, schedules: Sequence[Sequence[Action]]) -> tuple[tuple[Item, ...], ...]:
    """The actions of each stage, with the rendezvous between them; a single stage has none."""
    if pipeline.stages == 1:
        return tuple(map(tuple, schedules))
    calendars = _calendars(pipeline, schedules)
    found: list[list[tuple[tuple[float, int, int], Item]]] = [
        [((begins, 1, 0), action) for action, begins in zip(actions, calendar.begins, strict=True)]
        for actions, calendar in zip(schedules, calendars, strict=True)
    ]
    for stage, actions in enumerate(schedules):
        for sent, ends in zip(actions, calendars[stage].ends, strict=True):
            to = pipeline.target(stage, sent)
            if to is None:
                continue
            target, awaited = to
            latest = calendars[target].begins[calendars[target].place[awaited]]
            at = _rendezvous_time(ends, latest, calendars[stage], calendars[target])
            for each in (stage, target):  # sorted alike on both stages: by time, then by the stage that sends
                found[each].append(((at, 0, stage), Rendezvous(stage, sent, target, awaited)))
    return tuple(tuple(item for _, item in sorted(items)) for items in found)


class _Calendar(NamedTuple):
    """Times at which the actions of a stage begin and end, in order; `place`: the index of each action in these
    lists."""

    begins: list[float]
    ends: list[float]
    place: dict[Action, int]

    def busy_until(self, at: float) -> float:
        """The end of the action that is running at `at`, or `at`."""
        index = bisect_left(self.begins, at) - 1
        return max(at, self.ends[index]) if index >= 0 else at

    def borders(self, first: float, last: float) -> list[float]:
        """The times from `first` to `last` at which an action begins or ends."""
        return [
            moment for of in (self.begins, self.ends) for moment in of[bisect_left(of, first) : bisect_right(of, last)]
        ]


def _calendars(pipeline: Pipeline, schedules: Sequence[Sequence[Action]]) -> list[_Calendar]:
    whole = program_of(pipeline, schedules)
    clock = run(whole, lambda stage, op, ready_s: ready_s + _DURATION[op.executed_action.kind], message_s=0.0)
    return [
        _Calendar(
            [end - _DURATION[action.kind] for action, end in zip(actions, ends, strict=True)],
            ends,
            {action: index for index, action in enumerate(actions)},
        )
        for actions, ends in zip(schedules, clock.ends, strict=True)
    ]


def _rendezvous_time(earliest: float, latest: float, sender: _Calendar, receiver: _Calendar) -> float:
    def waiting(at: float) -> float:
        return max(sender.busy_until(at), receiver.busy_until(at)) - at

    moments = {*sender.borders(earliest, latest), *receiver.borders(earliest, latest)}
    return min(moments, key=lambda at: (waiting(at), -at))


@lru_cache(maxsize=256)
def rendezvous_program(pipeline: Pipeline) -> Program:
    """The schedules of a training step with their rendezvous, for the clock."""
    messages: dict[Rendezvous, int] = {}
    links: dict[tuple[object, ...], int] = {}

    def op_of(stage: int, item: Item) -> Op:
        if isinstance(item, Action):
            return Op(item, -1, -1, -1)
        message = messages.setdefault(item, len(messages))
        if stage == item.target:
            return Op(None, message, -1, -1)
        link = links.setdefault(link_of(stage, item.sent, item.target, item.awaited), len(links))
        return Op(None, -1, message, link)

    stages = [tuple(op_of(stage, item) for item in items) for stage, items in enumerate(items_in_training(pipeline))]
    return Program(tuple(stages), len(messages), len(links), has_rendezvous=True)

"""The clock of a pipeline: when each action of each stage runs, under the runtime's rules for messages; no torch.

The rules are those of `memo.parallel.stage_messages`: an action waits for its input; the receives of the next two
actions are posted, and only one while the stage waits to send; a message flows once both sides are there; a stage waits
for its last message on a link before it sends the next one there. `execute` tells the cost of an action, so one event
loop serves the check of a schedule in tests (nothing takes time), a prediction (constant durations) and a trace (layers
on streams).

    stage 0  | F0 | F1 | B0 ...         arrival = max(output is there, receive is posted) + message
    stage 1       | F0 | B0 | ...

Where stages meet for their messages (memo.spec.rendezvous), a message is an operation of its own on both stages: the
receiver posts its receive when it comes to the operation, and the sender waits until the message has arrived.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from memo.errors import ScheduleError
from memo.spec.schedule import Action, Link, Pipeline, link_of, stage_actions


class Op(NamedTuple):
    """One action with its messages: indices of a table of messages and of links, -1 where there is none.

    `action`: None for a message for which stages meet.
    """

    action: Action | None
    receives: int
    sends: int
    link: int

    @property
    def executed_action(self) -> Action:
        """The action of an operation that is executed."""
        assert self.action is not None, "a message for which stages meet is no action"
        return self.action


Execute = Callable[[int, Op, float], float]
"""(stage, operation, earliest start in seconds) -> end."""


@dataclass(frozen=True)
class Program:
    """The schedules of all stages with their messages resolved; `has_rendezvous`: whether stages meet for messages."""

    stages: tuple[tuple[Op, ...], ...]
    num_messages: int
    num_links: int
    has_rendezvous: bool = False


@dataclass
class Clock:
    """The times of a program that ran: by stage, the end of each of its operations in order."""

    program: Program
    ends: list[list[float]]

    @property
    def makespan_s(self) -> float:
        return max(ends[-1] for ends in self.ends)


@lru_cache(maxsize=256)
def program(pipeline: Pipeline) -> Program:
    """The schedules that all stages of a pipeline run."""
    return program_of(pipeline, [stage_actions(pipeline, stage) for stage in range(pipeline.stages)])


def program_of(pipeline: Pipeline, schedules: Sequence[Iterable[Action]]) -> Program:
    """The program of given schedules, one for each stage; a single stage sends no messages."""
    messages: dict[tuple[int, Action], int] = {}
    links: dict[Link, int] = {}
    stages = []
    for stage, actions in enumerate(schedules):
        ops = []
        for action in actions:
            receives = sends = link = -1
            if pipeline.stages > 1 and pipeline.source(stage, action) is not None:
                receives = messages.setdefault((stage, action), len(messages))
            target = pipeline.target(stage, action) if pipeline.stages > 1 else None
            if target is not None:
                sends = messages.setdefault(target, len(messages))
                name = link_of(stage, action, *target)
                link = links.setdefault(name, len(links))
            ops.append(Op(action, receives, sends, link))
        stages.append(tuple(ops))
    return Program(tuple(stages), len(messages), len(links))


def run(program: Program, execute: Execute, message_s: float) -> Clock:
    """Run all stages against each other from time 0.

    Raises ScheduleError when no stage can go on. Assumes that the messages of a link are sent in the order in which
    they are awaited; tests check this for every schedule (tests/support/schedules.py).
    """
    return _Run(program, execute, message_s).run()


class _Run:
    def __init__(self, program: Program, execute: Execute, message_s: float) -> None:
        self.program, self.execute, self.message_s = program, execute, message_s
        self.posted: list[float | None] = [None] * program.num_messages
        self.issued: list[float | None] = [None] * program.num_messages
        self.arrived: list[float | None] = [None] * program.num_messages
        self.last_on: list[int] = [-1] * program.num_links
        count = len(program.stages)
        self.now = [0.0] * count
        self.unsent: list[Op | None] = [None] * count
        self.clock = Clock(program, [[] for _ in range(count)])

    def run(self) -> Clock:
        stages = range(len(self.program.stages))
        while True:
            moved = [self._advance(stage) for stage in stages]
            if not any(moved):
                break
        waiting = [
            f"stage {stage} at {ops[len(ends)].action}"
            for stage, (ops, ends) in enumerate(zip(self.program.stages, self.clock.ends, strict=True))
            if len(ends) < len(ops)
        ]
        if waiting or any(self.unsent):
            raise ScheduleError(f"the schedule deadlocks: {', '.join(waiting) or 'all stages wait to send'}")
        return self.clock

    def _advance(self, stage: int) -> bool:
        """Run a stage until it has to wait for another one. Return whether anything happened."""
        ops, ends = self.program.stages[stage], self.clock.ends[stage]
        moved = False
        while True:
            unsent = self.unsent[stage]
            if unsent is not None:
                if not self._send(stage, unsent):
                    return moved
                self.unsent[stage], moved = None, True
            index = len(ends)
            if index == len(ops):
                return moved
            op, now = ops[index], self.now[stage]
            self._post(op, now)
            if index + 1 < len(ops) and not self.program.has_rendezvous:
                self._post(ops[index + 1], now)
            ready = 0.0
            if op.receives >= 0:
                arrived = self.arrived[op.receives]
                if arrived is None:
                    return moved
                ready = arrived
            start = ready if ready > now else now
            end = start if op.action is None else self.execute(stage, op, start)
            ends.append(end)
            self.now[stage] = end
            moved = True
            if op.sends >= 0:
                self.unsent[stage] = op

    def _post(self, op: Op, now: float) -> None:
        message = op.receives
        if message >= 0 and self.posted[message] is None:
            self.posted[message] = now
            issued = self.issued[message]
            if issued is not None:
                self.arrived[message] = max(issued, now) + self.message_s

    def _send(self, stage: int, op: Op) -> bool:
        """Issue the output of an action. Return False while the last message on its link has not arrived; where stages
        meet, while this message has not arrived."""
        if self.program.has_rendezvous and self.issued[op.sends] is not None:
            return self._has_met(stage, op.sends)
        previous = self.last_on[op.link]
        if previous >= 0:
            arrived = self.arrived[previous]
            if arrived is None:
                return False
            self.now[stage] = max(self.now[stage], arrived)
        now, message = self.now[stage], op.sends
        self.issued[message], self.last_on[op.link] = now, message
        posted = self.posted[message]
        if posted is not None:
            self.arrived[message] = max(posted, now) + self.message_s
        return self._has_met(stage, message) if self.program.has_rendezvous else True

    def _has_met(self, stage: int, message: int) -> bool:
        arrived = self.arrived[message]
        if arrived is None:
            return False
        self.now[stage] = self.clock.ends[stage][-1] = max(self.now[stage], arrived)
        return True

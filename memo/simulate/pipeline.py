"""A pipeline schedule in time: when each action of each stage runs, under the runtime's rules for messages.

The rules are those of `memo.parallel.pipeline`: an action waits for its input; receives of the next two actions
are posted; a message flows when both sides are there; a stage waits for its last message on a link before it
sends the next one there. What an action costs is asked of `execute`, so the same clock serves constant
durations (a prediction) and layers on streams (a trace).

    stage 0  | F0 | F1 | B0 ...         arrival = max(output is there, receive is posted) + message
    stage 1       | F0 | B0 | ...
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from memo.errors import ScheduleError
from memo.spec.schedule import Action, Link, Pipeline, link_of, stage_actions


@dataclass(frozen=True)
class Op:
    """One action with its messages: indices of a table of messages and of links, -1 where there is none."""

    action: Action
    receives: int
    sends: int
    link: int


Execute = Callable[[int, Op, float], float]
"""(stage, operation, earliest start in seconds) -> end."""


@dataclass(frozen=True)
class Program:
    """The schedules of all stages with their messages resolved."""

    stages: tuple[tuple[Op, ...], ...]
    num_messages: int
    num_links: int


@dataclass
class Clock:
    """What running a program gives: by stage, the end of each action in order."""

    ends: list[list[float]]

    @property
    def makespan_s(self) -> float:
        return max(ends[-1] for ends in self.ends)


@lru_cache(maxsize=256)
def program(pipeline: Pipeline) -> Program:
    """The schedules of all stages; one stage alone sends no messages."""
    schedules = [stage_actions(pipeline, stage) for stage in range(pipeline.stages)]
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
    """Runs all stages against each other from time 0. Raises ScheduleError when none can go on."""
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
        self.clock = Clock([[] for _ in range(count)])

    def run(self) -> Clock:
        stages = range(len(self.program.stages))
        while True:
            moved = [self._advance(stage) for stage in stages]
            if not any(moved):
                break
        if any(self.unsent) or any(len(self.clock.ends[s]) < len(self.program.stages[s]) for s in stages):
            raise ScheduleError("the schedule deadlocks in simulation: check it with memo.spec.schedule.simulate")
        return self.clock

    def _advance(self, stage: int) -> bool:
        """Run a stage until it has to wait for another; whether anything happened."""
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
            if index + 1 < len(ops):
                self._post(ops[index + 1], now)
            ready = 0.0
            if op.receives >= 0:
                arrived = self.arrived[op.receives]
                if arrived is None:
                    return moved
                ready = arrived
            start = ready if ready > now else now
            end = self.execute(stage, op, start)
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
        """Issue the output of an action; False while the last message on its link has not arrived."""
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
        return True


def steady_microbatches(pipeline: Pipeline) -> int:
    """Microbatches after which more of them only repeat the steady phase."""
    is_interleaved = pipeline.chunks > 1 and not pipeline.breadth_first
    return min(pipeline.microbatches, 3 * pipeline.stages if is_interleaved else 2 * pipeline.stages + 2)


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

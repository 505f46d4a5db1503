"""Schedules as data: 1F1B, interleaved 1F1B (Narayanan et al., 2021), and breadth first on one stage; no torch.

A schedule is, for each stage, a list of actions. It can be printed, simulated and checked before
anything runs; the runtime (`memo.parallel.pipeline`), and later the swap plan, obey the same list.

Stage r of p holds `chunks` runs of layers; chunk c of stage r is virtual stage c * p + r.
"""

from collections import Counter, defaultdict, deque
from dataclasses import dataclass
from typing import Literal

from memo.config import RunConfig
from memo.config.derived import num_microbatches
from memo.errors import ScheduleError

Kind = Literal["F", "B"]
Link = tuple[int, int, Kind, bool]
"""(source stage, target stage, kind, wraps around): its messages share a communicator and keep order."""


@dataclass(frozen=True)
class Action:
    """Forward or backward of one microbatch through one chunk of this stage."""

    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True)
class Pipeline:
    """Sizes of a pipeline: stages p, chunks a stage, microbatches a step.

    Attributes:
        breadth_first: all microbatches pass one layer before the next; then there is one stage, whose chunks are its
            layers.
    """

    stages: int
    chunks: int
    microbatches: int
    breadth_first: bool = False

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + stage

    @property
    def last_virtual_stage(self) -> int:
        return self.stages * self.chunks - 1

    def layers(self, stage: int, chunk: int, num_layers: int) -> range:
        """Global layer indices of one chunk; num_layers divides evenly (checked with the config)."""
        size = num_layers // (self.stages * self.chunks)
        first = self.virtual_stage(stage, chunk) * size
        return range(first, first + size)

    def source(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and action whose output this action needs, or None at either end of the model."""
        virtual = self.virtual_stage(stage, action.chunk)
        virtual += -1 if action.kind == "F" else 1
        if not 0 <= virtual <= self.last_virtual_stage:
            return None
        return virtual % self.stages, Action(action.kind, action.microbatch, virtual // self.stages)

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and action that need this action's output."""
        virtual = self.virtual_stage(stage, action.chunk)
        virtual += 1 if action.kind == "F" else -1
        if not 0 <= virtual <= self.last_virtual_stage:
            return None
        return virtual % self.stages, Action(action.kind, action.microbatch, virtual // self.stages)


def pipeline_of(config: RunConfig, world_size: int) -> Pipeline:
    """The pipeline whose `actions` a configuration runs."""
    parallel, microbatches = config.parallel, num_microbatches(config, world_size)
    if parallel.gradient_accumulation_order == "breadth_first":
        return Pipeline(1, config.model.num_layers, microbatches, breadth_first=True)
    return Pipeline(parallel.pp, parallel.vpp, microbatches)


def stage_actions(pipeline: Pipeline, stage: int) -> list[Action]:
    """What a stage does in one training step, in order."""
    return breadth_first(pipeline) if pipeline.breadth_first else one_f_one_b(pipeline, stage)


def breadth_first(pipeline: Pipeline) -> list[Action]:
    """All microbatches through one chunk before the next, on one stage (memo.train.breadth_first).

    Order of Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022.
    """
    chunks, each = range(pipeline.chunks), range(pipeline.microbatches)
    forwards = [Action("F", microbatch, chunk) for chunk in chunks for microbatch in each]
    return forwards + [Action("B", microbatch, chunk) for chunk in reversed(chunks) for microbatch in each]


def one_f_one_b(pipeline: Pipeline, stage: int) -> list[Action]:
    """1F1B, interleaved when a stage has several chunks (microbatches % stages == 0 then).

    Warm-up forwards, then one forward and one backward in turn, then the remaining backwards.
    """
    forwards = [_forward(pipeline, i) for i in range(pipeline.microbatches * pipeline.chunks)]
    backwards = [Action("B", action.microbatch, pipeline.chunks - 1 - action.chunk) for action in forwards]
    warmup = _num_warmup(pipeline, stage)
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - warmup :]


def forward_only(pipeline: Pipeline, stage: int) -> list[Action]:
    """The forwards of the schedule, for evaluation; the same for every stage."""
    del stage
    return [_forward(pipeline, i) for i in range(pipeline.microbatches * pipeline.chunks)]


def _forward(pipeline: Pipeline, index: int) -> Action:
    if pipeline.chunks == 1:
        return Action("F", index, 0)
    group, within = divmod(index, pipeline.stages * pipeline.chunks)
    chunk, offset = divmod(within, pipeline.stages)
    return Action("F", group * pipeline.stages + offset, chunk)


def most_in_flight(pipeline: Pipeline, stage: int) -> int:
    """Chunks x microbatches at the peak whose forward has run and whose backward has not; as `simulate` counts them."""
    return min(_num_warmup(pipeline, stage) + 1, pipeline.microbatches * pipeline.chunks)


def _num_warmup(pipeline: Pipeline, stage: int) -> int:
    remaining = pipeline.stages - stage - 1
    total = pipeline.microbatches * pipeline.chunks
    if pipeline.chunks == 1:
        return min(remaining, total)
    return min(remaining * 2 + (pipeline.chunks - 1) * pipeline.stages, total)


def simulate(pipeline: Pipeline, schedules: list[list[Action]]) -> list[int]:
    """Run the schedules against each other and return the peak of in-flight microbatches per stage.

    The rules are the runtime's: an action waits for its input; its output is sent once the message
    before it on the same link has found its receive; the receives of the next two actions are
    posted, of one while the stage waits to send.

    Raises ScheduleError when no stage can go on, when messages of one link would arrive in another
    order than they are awaited, when an action is missing or repeated, or a backward stands before
    its forward.
    """
    _check_complete(pipeline, schedules)
    _check_forward_first(schedules)
    return _Simulation(pipeline, schedules).run()


class _Simulation:
    def __init__(self, pipeline: Pipeline, schedules: list[list[Action]]) -> None:
        self.pipeline, self.schedules = pipeline, schedules
        self.links: dict[Link, deque[Action]] = defaultdict(deque)  # sent, not yet taken
        self.position = [0] * pipeline.stages
        self.unsent: dict[int, tuple[Link, Action]] = {}
        self.live = [0] * pipeline.stages
        self.peak = [0] * pipeline.stages

    def run(self) -> list[int]:
        stages = range(self.pipeline.stages)
        while self.unsent or any(self.position[s] < len(self.schedules[s]) for s in stages):
            moved = [self._send(stage) | self._compute(stage) for stage in stages]
            if not any(moved):
                waiting = ", ".join(
                    f"stage {s} at {self.schedules[s][p]}"
                    for s, p in enumerate(self.position)
                    if p < len(self.schedules[s])
                )
                raise ScheduleError(f"the schedule deadlocks: {waiting or 'all stages wait to send'}")
        return self.peak

    def _send(self, stage: int) -> bool:
        if stage not in self.unsent:
            return False
        link, message = self.unsent[stage]
        queue, target = self.links[link], link[1]
        first = self.position[target]
        posted = self.schedules[target][first : first + (1 if target in self.unsent else 2)]
        if queue and queue[-1] not in posted:
            return False
        queue.append(message)
        del self.unsent[stage]
        return True

    def _compute(self, stage: int) -> bool:
        if stage in self.unsent or self.position[stage] == len(self.schedules[stage]):
            return False
        action = self.schedules[stage][self.position[stage]]
        source = self.pipeline.source(stage, action)
        if source is not None:
            queue = self.links[link_of(source[0], source[1], stage, action)]
            if not queue:
                return False
            if queue[0] != action:
                raise ScheduleError(f"stage {stage} awaits the input of {action}, but {queue[0]} was sent first")
            queue.popleft()
        self.position[stage] += 1
        self.live[stage] += 1 if action.kind == "F" else -1
        self.peak[stage] = max(self.peak[stage], self.live[stage])
        target = self.pipeline.target(stage, action)
        if target is not None:
            self.unsent[stage] = (link_of(stage, action, *target), target[1])
        return True


def link_of(source_stage: int, source: Action, target_stage: int, target: Action) -> Link:
    """The link that carries a message between two neighbouring virtual stages."""
    return source_stage, target_stage, source.kind, source.chunk != target.chunk


def _check_complete(pipeline: Pipeline, schedules: list[list[Action]]) -> None:
    kinds: list[Kind] = sorted({action.kind for actions in schedules for action in actions}, reverse=True)
    expected = Counter(
        Action(kind, m, c) for kind in kinds for m in range(pipeline.microbatches) for c in range(pipeline.chunks)
    )
    for stage, actions in enumerate(schedules):
        if Counter(actions) != expected:
            wrong = (Counter(actions) - expected) + (expected - Counter(actions))
            names = ", ".join(sorted(str(action) for action in wrong))
            raise ScheduleError(f"stage {stage}: actions missing or repeated: {names}")


def _check_forward_first(schedules: list[list[Action]]) -> None:
    """The last virtual stage awaits no message before a backward, so deadlock alone would not show this."""
    for stage, actions in enumerate(schedules):
        done: set[Action] = set()
        for action in actions:
            forward = Action("F", action.microbatch, action.chunk)
            if action.kind == "B" and forward not in done:
                raise ScheduleError(f"stage {stage}: {action} stands before {forward}")
            done.add(action)


def to_text(schedules: list[list[Action]]) -> str:
    """One line a stage: `stage 0: F0 F1 B0 ...`."""
    return "\n".join(
        f"stage {stage}: " + " ".join(str(action) for action in actions) for stage, actions in enumerate(schedules)
    )

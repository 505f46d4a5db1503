"""Schedules as data: 1F1B, interleaved 1F1B (Narayanan et al., 2021), and breadth first on one stage; no torch.

A schedule is, for each stage, a list of actions. It can be printed, and checked and timed (`memo.spec.clock`),
before anything runs; the runtime (`memo.parallel.pipeline`) and the swap plan obey the same list.

Stage r of p holds `chunks` runs of layers; chunk c of stage r is virtual stage c * p + r.
"""

from typing import Literal, NamedTuple

from memo.config import RunConfig
from memo.config.derived import num_microbatches

Kind = Literal["F", "B"]
Link = tuple[int, int, Kind, bool]
"""(source stage, target stage, kind, wraps around): the messages of a link share a communicator and keep their
order."""


class Action(NamedTuple):
    """Forward or backward of one microbatch through one chunk of this stage."""

    kind: Kind
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


class Pipeline(NamedTuple):
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
        return self._beside(stage, action, -1 if action.kind == "F" else 1)

    def target(self, stage: int, action: Action) -> tuple[int, Action] | None:
        """The stage and action that need this action's output."""
        return self._beside(stage, action, 1 if action.kind == "F" else -1)

    def _beside(self, stage: int, action: Action, step: int) -> tuple[int, Action] | None:
        virtual = self.virtual_stage(stage, action.chunk) + step
        if not 0 <= virtual <= self.last_virtual_stage:
            return None
        return virtual % self.stages, Action(action.kind, action.microbatch, virtual // self.stages)


def pipeline_of(config: RunConfig, world_size: int) -> Pipeline:
    """The pipeline whose actions a configuration runs."""
    parallel, microbatches = config.parallel, num_microbatches(config, world_size)
    if parallel.gradient_accumulation_order == "breadth_first":
        return Pipeline(1, config.model.num_layers, microbatches, breadth_first=True)
    return Pipeline(parallel.pp, parallel.vpp, microbatches)


def stage_actions(pipeline: Pipeline, stage: int) -> list[Action]:
    """The actions of a stage in one training step, in order."""
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


def forward_only(pipeline: Pipeline) -> list[Action]:
    """The forwards of the schedule, for evaluation; the same for every stage."""
    return [_forward(pipeline, i) for i in range(pipeline.microbatches * pipeline.chunks)]


def _forward(pipeline: Pipeline, index: int) -> Action:
    if pipeline.chunks == 1:
        return Action("F", index, 0)
    group, within = divmod(index, pipeline.stages * pipeline.chunks)
    chunk, offset = divmod(within, pipeline.stages)
    return Action("F", group * pipeline.stages + offset, chunk)


def most_in_flight(pipeline: Pipeline, stage: int) -> int:
    """The most chunks x microbatches whose forward has run and whose backward has not."""
    return min(_num_warmup(pipeline, stage) + 1, pipeline.microbatches * pipeline.chunks)


def _num_warmup(pipeline: Pipeline, stage: int) -> int:
    remaining = pipeline.stages - stage - 1
    total = pipeline.microbatches * pipeline.chunks
    if pipeline.chunks == 1:
        return min(remaining, total)
    return min(remaining * 2 + (pipeline.chunks - 1) * pipeline.stages, total)


def link_of(source_stage: int, source: Action, target_stage: int, target: Action) -> Link:
    """The link that carries a message between two neighbouring virtual stages."""
    return source_stage, target_stage, source.kind, source.chunk != target.chunk

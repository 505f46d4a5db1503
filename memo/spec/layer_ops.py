"""A schedule expanded into layers: the order in which one pipeline stage runs the operations of its layers.

Swap plans and state plans are made from this order, and the runtime obeys it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from memo.config import RunConfig
from memo.errors import PlanError
from memo.spec.schedule import Action, Kind, Pipeline, most_in_flight, stage_actions


@dataclass(frozen=True)
class LayerOp:
    """Forward or backward of one microbatch through one layer; `layer` is the global layer index.

    `section` numbers a part of the sequence where a layer runs section by section (`in_sections`).
    """

    kind: Kind
    microbatch: int
    layer: int
    section: int | None = None

    @property
    def key(self) -> tuple[int, ...]:
        """(microbatch, layer) and the section, if there is one: what a slot or a host record holds."""
        whole = self.microbatch, self.layer
        return whole if self.section is None else (*whole, self.section)

    def __str__(self) -> str:
        of_layer = f"{self.kind}{self.microbatch} layer {self.layer}"
        return of_layer if self.section is None else f"{of_layer} section {self.section}"


def layer_ops(pipeline: Pipeline, stage: int, num_layers: int, actions: Iterable[Action]) -> list[LayerOp]:
    """Expands the actions of one stage into layers: forwards upward, backwards downward.

    Raises PlanError when the layers do not divide evenly among the chunks.
    """
    chunks = pipeline.stages * pipeline.chunks
    if num_layers % chunks:
        raise PlanError(
            f"num_layers {num_layers} is not divisible by {chunks} = {pipeline.stages} stages x"
            f" {pipeline.chunks} chunks: choose a multiple"
        )
    ops = []
    for action in actions:
        layers = pipeline.layers(stage, action.chunk, num_layers)
        order = layers if action.kind == "F" else reversed(layers)
        ops += [LayerOp(action.kind, action.microbatch, layer) for layer in order]
    return ops


def stage_ops(pipeline: Pipeline, stage: int, num_layers: int) -> list[LayerOp]:
    """All layer operations of one stage in one training step, in order; raises as `layer_ops`."""
    return layer_ops(pipeline, stage, num_layers, stage_actions(pipeline, stage))


def in_sections(ops: Iterable[LayerOp], sections: int) -> list[LayerOp]:
    """Every layer operation cut along the sequence: forwards begin with the first section, backwards with the last.

    Under a causal mask the queries of a section need the keys and values of no later section, so a forward can run in
    this order; in the reverse order the gradients of a section's keys and values are complete after its backward.
    """
    order = {"F": range(sections), "B": range(sections)[::-1]}
    return [replace(op, section=section) for op in ops for section in order[op.kind]]


def layers_in_flight(config: RunConfig, microbatches: int, stage: int) -> int:
    """Layers x microbatches whose activations a stage holds at the peak of (interleaved) 1F1B, or breadth first."""
    if config.parallel.gradient_accumulation_order == "breadth_first":
        return microbatches * config.model.num_layers
    pipeline = Pipeline(config.parallel.pp, config.parallel.vpp, microbatches)
    return most_in_flight(pipeline, stage) * len(pipeline.layers(stage, 0, config.model.num_layers))

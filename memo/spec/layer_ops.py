"""A schedule expanded into layers: the order in which one pipeline stage runs the operations of its layers.

Swap plans and state plans are made from this order, and the runtime obeys it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from memo.errors import PlanError
from memo.spec.schedule import Action, Kind, Pipeline, most_in_flight, stage_actions


@dataclass(frozen=True)
class LayerOp:
    """Forward or backward of one microbatch through one layer; `layer` is the global layer index.

    `section` numbers a part of the sequence where a layer runs section by section (`in_sections`). A forward that
    `discards` leaves nothing to the backward: a second forward of the same layer precedes the backward
    (`with_attention_again`).
    """

    kind: Kind
    microbatch: int
    layer: int
    section: int | None = None
    discards: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """The key of a slot's or a host record's content: `microbatch`, `layer`, and the other fields that are set."""
        if self.discards:
            return self.microbatch, self.layer, self.section, self.discards
        whole = self.microbatch, self.layer
        return whole if self.section is None else (*whole, self.section)

    def __str__(self) -> str:
        section = "" if self.section is None else f" section {self.section}"
        return f"{self.kind}{self.microbatch} layer {self.layer}{section}{', discards' if self.discards else ''}"


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


def with_attention_again(ops: Iterable[LayerOp], again: Collection[int]) -> list[LayerOp]:
    """Operations of whole layers where those in `again` recompute attention (memo.spec.stack.recomputing_layers).

    The first forward of such a layer discards its activations, and a second one directly precedes the backward.
    """
    expanded = []
    for op in ops:
        if op.layer not in again:
            expanded.append(op)
        elif op.kind == "F":
            expanded.append(replace(op, discards=True))
        else:
            expanded += [replace(op, kind="F"), op]
    return expanded


class SweptOps(NamedTuple):
    """The operations of layers that are swept, in one list for each kind of content that moves.

    Attributes:
        sections: all sections of all layers, in order.
        keys: keys and values, of the layers that have them: whole layers, or sections where their store slides.
        inputs: inputs of the sections of layers that recompute attention: the first forward writes an input ("F"), and
            the second forward reads it ("B").
        keys_slide: as in memo.spec.sweep.KeyValueLayout.
    """

    sections: list[LayerOp]
    keys: list[LayerOp]
    inputs: list[LayerOp]
    keys_slide: bool


def swept_ops(
    ops: Sequence[LayerOp],
    sections: int,
    again: Collection[int] = (),
    attending: frozenset[int] | None = None,
    keys_slide: bool = False,
) -> SweptOps:
    """Expand the operations of whole layers; arguments as in `in_sections` and `with_attention_again`.

    Args:
        attending: the layers that have keys and values (memo.spec.stack.attending_layers); None: all.
    """
    whole = with_attention_again(ops, again)
    cut = in_sections(whole, sections)
    keys = [op for op in (cut if keys_slide else whole) if attending is None or op.layer in attending]
    of_inputs = (op for op in cut if op.kind == "F" and op.layer in again)
    inputs = [replace(op, discards=False) if op.discards else replace(op, kind="B") for op in of_inputs]
    return SweptOps(cut, keys, inputs, keys_slide)


def layers_in_flight(pipeline: Pipeline, num_layers: int, stage: int) -> int:
    """Layers x microbatches whose activations a stage holds at the peak of (interleaved) 1F1B, or breadth first."""
    if pipeline.breadth_first:
        return pipeline.microbatches * num_layers
    return most_in_flight(pipeline, stage) * len(pipeline.layers(stage, 0, num_layers))

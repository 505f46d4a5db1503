"""A schedule expanded into layers: the order in which one pipeline stage runs the operations of its layers.

Swap plans and state plans are made from this order, and the runtime obeys it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from memo.config import RunConfig
from memo.errors import PlanError
from memo.spec.schedule import Action, Kind, Pipeline, most_in_flight, stage_actions


@dataclass(frozen=True)
class LayerOp:
    """Forward or backward of one microbatch through one layer; `layer` is the global layer index.

    `section` numbers a part of the sequence where a layer runs section by section (`in_sections`). A forward that
    `discards` leaves nothing to a backward: another forward of the same layer precedes that (`with_attention_again`).
    """

    kind: Kind
    microbatch: int
    layer: int
    section: int | None = None
    discards: bool = False

    @property
    def key(self) -> tuple[Any, ...]:
        """What a slot or a host record holds: `microbatch`, `layer`, and the other fields as far as they are set."""
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


def with_attention_again(ops: Iterable[LayerOp], chunk_layers: int, again: int) -> list[LayerOp]:
    """Operations of whole layers where the first `again` layers of each pipeline chunk recompute attention.

    The first forward of such a layer discards its activations, and a second one directly precedes the backward. They
    are the first layers because their backwards come last, when the layers after them have freed the host records that
    the second forward takes.

    Args:
        chunk_layers: layers of a pipeline chunk.
    """
    expanded = []
    for op in ops:
        if op.layer % chunk_layers >= again:
            expanded.append(op)
        elif op.kind == "F":
            expanded.append(replace(op, discards=True))
        else:
            expanded += [replace(op, kind="F"), op]
    return expanded


class SweptOps(NamedTuple):
    """The operations of layers that are swept, by what they move.

    Attributes:
        sections: of all sections of all layers, in order.
        keys: of whole layers, whose keys and values move.
        inputs: of the sections of layers that recompute attention: their first forward writes an input ("F"), and
            their second forward reads it ("B").
        hidden: of the sections of hidden states and their gradients (`hidden_ops`); none where they stay on the device.
        evaluation: the same of the forwards of one microbatch, between training steps.
    """

    sections: list[LayerOp]
    keys: list[LayerOp]
    inputs: list[LayerOp]
    hidden: list[LayerOp]
    evaluation: list[LayerOp]


def swept_ops(
    ops: Sequence[LayerOp], sections: int, chunk_layers: int, again: int, moves_hidden: bool = False
) -> SweptOps:
    """From the operations of whole layers; arguments as of `in_sections`, `with_attention_again` and `hidden_ops`."""
    keys = with_attention_again(ops, chunk_layers, again)
    cut = in_sections(keys, sections)
    of_inputs = (op for op in cut if op.kind == "F" and op.layer % chunk_layers < again)
    inputs = [replace(op, discards=False) if op.discards else replace(op, kind="B") for op in of_inputs]
    if not moves_hidden:
        return SweptOps(cut, keys, inputs, [], [])
    forwards = [LayerOp("F", 0, layer) for layer in range(chunk_layers)]
    hidden, evaluation = (hidden_ops(each, sections, chunk_layers) for each in (ops, forwards))
    return SweptOps(cut, keys, inputs, hidden, evaluation)


def hidden_ops(ops: Sequence[LayerOp], sections: int, num_layers: int) -> list[LayerOp]:
    """Every writing ("F") and reading ("B") of a section of hidden states on a stage that has the whole model.

    `layer` counts the times that hidden states, or their gradients, have been written, n = num_layers:

        written by    embedding   layer i   loss, forward   loss, backward   layer i, backward
        as            0           i + 1     n + 1           n + 2            2 n + 2 - i
        read by       layer 0     the next layer, the loss: forward, then backward, layers downward, the embedding

    The forward of the loss writes what it has read for its backward. Where no operation of `ops` is a backward, it only
    reads. A writer writes each section after it has read that one.

    Args:
        ops: of whole layers, all of one training step, or the forwards of an evaluation.
    """
    trains = any(op.kind == "B" for op in ops)
    found: list[LayerOp] = []

    def move(at: LayerOp, read: int | None, written: int | None) -> None:
        order = (
            range(sections)[::-1] if at.kind == "B" and read is not None and written is not None else range(sections)
        )
        for section in order:
            if read is not None:
                found.append(LayerOp("B", at.microbatch, read, section))
            if written is not None:
                found.append(LayerOp("F", at.microbatch, written, section))

    end = 2 * num_layers + 2
    for (kind, layer), group in groupby(ops, key=lambda op: (op.kind, op.layer)):
        same = list(group)  # of one layer, one after the other: all microbatches, where these go breadth first
        if kind == "F" and layer == 0:
            for op in same:
                move(op, None, 0)
        for op in same:
            move(op, *((layer, layer + 1) if kind == "F" else (end - layer - 1, end - layer)))
        for op in same:
            if kind == "F" and layer == num_layers - 1:
                move(op, num_layers, num_layers + 1 if trains else None)
                if trains:
                    move(op, num_layers + 1, num_layers + 2)
            elif kind == "B" and layer == 0:
                move(op, end, None)
    return found


def layers_in_flight(config: RunConfig, microbatches: int, stage: int) -> int:
    """Layers x microbatches whose activations a stage holds at the peak of (interleaved) 1F1B, or breadth first."""
    if config.parallel.gradient_accumulation_order == "breadth_first":
        return microbatches * config.model.num_layers
    pipeline = Pipeline(config.parallel.pp, config.parallel.vpp, microbatches)
    return most_in_flight(pipeline, stage) * len(pipeline.layers(stage, 0, config.model.num_layers))

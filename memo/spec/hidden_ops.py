"""The order in which one stage writes and reads hidden states and their gradients in host memory.

memo.planner.swap.sweep_plans makes a swap plan from this order, and memo.executor.hidden_states obeys the plan.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from memo.spec.layer_ops import LayerOp
from memo.spec.rendezvous import Item, Rendezvous, items_in_evaluation, items_in_training
from memo.spec.schedule import Action, Kind, Pipeline


class HiddenOps(NamedTuple):
    """Writes and reads of hidden states on one stage.

    Attributes:
        training: those of one training step.
        evaluation: those of the forwards of one global batch, between training steps.
    """

    training: list[LayerOp]
    evaluation: list[LayerOp]


def stage_hidden_ops(pipeline: Pipeline, stage: int, num_layers: int, sections: int) -> HiddenOps:
    """The operations of one stage. `pipeline` is that of training steps; an evaluation does not go breadth first."""
    forwards = Pipeline(1, 1, pipeline.microbatches) if pipeline.breadth_first else pipeline
    return HiddenOps(
        hidden_ops(pipeline, stage, num_layers, items_in_training(pipeline)[stage], sections),
        hidden_ops(forwards, stage, num_layers, items_in_evaluation(forwards)[stage], sections),
    )


def hidden_ops(pipeline: Pipeline, stage: int, num_layers: int, items: Sequence[Item], sections: int) -> list[LayerOp]:
    """Every write ("F") and read ("B") of a section, in order.

    `layer` counts how often the hidden states of a microbatch, or their gradients, have been written on any stage
    before; n = num_layers:

        written by    embedding   layer i   loss, backward   layer i, backward
        as            0           i + 1     n + 1            2 n + 1 - i
        read by       layer 0     the next layer, the backward of the loss, layers downward, the embedding

    A rendezvous of two stages reads on the one stage the output of its `sent`, and writes it on the other stage. The
    forward of the loss reads in an evaluation, and does nothing in training. Every module and message reads a section
    before it writes that section.
    """
    writer = _Writer(num_layers, sections, trains=any(isinstance(item, Action) and item.kind == "B" for item in items))

    def alike(item: Item) -> object:
        return (item.kind, item.chunk) if pipeline.breadth_first and isinstance(item, Action) else item

    for _, group in groupby(items, key=alike):
        same = list(group)
        for item in same:
            if isinstance(item, Rendezvous):
                at = item.sent if item.source == stage else item.awaited
                writer.meet(at, pipeline.layers(stage, at.chunk, num_layers), reads=item.source == stage)
        writer.act([item for item in same if isinstance(item, Action)], pipeline, stage)
    return writer.found


class _Writer:
    """Collects the operations of a stage."""

    def __init__(self, num_layers: int, sections: int, trains: bool) -> None:
        self.num_layers, self.sections, self.trains = num_layers, sections, trains
        self.end = 2 * num_layers + 1
        self.found: list[LayerOp] = []

    def meet(self, at: Action, layers: range, reads: bool) -> None:
        """Add the message of a rendezvous at an action of the chunk that has `layers`: its input, or its output if it
        `reads`."""
        below, above = layers.start, layers.stop
        made, needed = (above, below) if at.kind == "F" else (self.end - below, self.end - above)
        place = made if reads else needed
        self._move(at.microbatch, place if reads else None, None if reads else place)

    def act(self, actions: Sequence[Action], pipeline: Pipeline, stage: int) -> None:
        """Add all modules of an action, one after the other. Where several microbatches pass together, each module
        takes all of them before the next module."""
        if not actions:
            return
        kind, chunk = actions[0].kind, actions[0].chunk
        layers = pipeline.layers(stage, chunk, self.num_layers)
        ends_here = layers.stop == self.num_layers
        microbatches = [action.microbatch for action in actions]
        if kind == "F":
            if layers.start == 0:
                self._move_all(microbatches, None, 0)
            for layer in layers:
                self._move_all(microbatches, layer, layer + 1)
            if ends_here and (pipeline.breadth_first or not self.trains):
                self._loss(microbatches)
            return
        if ends_here and not pipeline.breadth_first:
            self._loss(microbatches)
        for layer in reversed(layers):
            self._move_all(microbatches, self.end - layer - 1, self.end - layer, "B")
        if layers.start == 0:
            self._move_all(microbatches, self.end, None)

    def _loss(self, microbatches: Sequence[int]) -> None:
        self._move_all(microbatches, self.num_layers, self.num_layers + 1 if self.trains else None)

    def _move_all(self, microbatches: Sequence[int], read: int | None, written: int | None, kind: Kind = "F") -> None:
        for microbatch in microbatches:
            self._move(microbatch, read, written, kind)

    def _move(self, microbatch: int, read: int | None, written: int | None, kind: Kind = "F") -> None:
        """Add the reads and writes of all sections; `kind` "B": of a layer's backward, which begins with the last
        section."""
        order = range(self.sections)
        for section in order if kind == "F" else reversed(order):
            if read is not None:
                self.found.append(LayerOp("B", microbatch, read, section))
            if written is not None:
                self.found.append(LayerOp("F", microbatch, written, section))


def most_hidden_states(pipeline: Pipeline, stage: int) -> int:
    """The most hidden states or gradients of hidden states, each of one microbatch, that a stage has at once.

    They wait between two modules of an action, for an action, or for the stage to which they are sent.
    """
    if pipeline.breadth_first:
        return pipeline.microbatches  # between two layers
    if pipeline.chunks == 1:
        return min(2, pipeline.microbatches) if stage else 1
    # More than two chunks, or than two microbatches a stage, only repeat the same pattern.
    return _most_at_once(Pipeline(pipeline.stages, 2, min(pipeline.microbatches, 2 * pipeline.stages)), stage)


@lru_cache(maxsize=256)
def _most_at_once(pipeline: Pipeline, stage: int) -> int:
    """The most in a training step, which holds no fewer than an evaluation."""
    ops = hidden_ops(pipeline, stage, pipeline.stages * pipeline.chunks, items_in_training(pipeline)[stage], 1)
    return max(accumulate(1 if op.kind == "F" else -1 for op in ops))

"""The order in which one stage writes and reads hidden states, and their gradients, where these are in host memory.

A swap plan is made from it (memo.planner.swap.sweep_plans), which memo.executor.hidden_states obeys.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, groupby
from typing import NamedTuple

from memo.spec.layer_ops import LayerOp
from memo.spec.meetings import Item, Meeting, items_in_evaluation, items_in_training
from memo.spec.schedule import Action, Kind, Pipeline


class HiddenOps(NamedTuple):
    """What one stage moves of hidden states.

    Attributes:
        training: in one training step.
        evaluation: in the forwards of one global batch, between training steps.
    """

    training: list[LayerOp]
    evaluation: list[LayerOp]


def stage_hidden_ops(pipeline: Pipeline, stage: int, num_layers: int, sections: int) -> HiddenOps:
    """`pipeline`: of training steps; an evaluation does not go breadth first."""
    forwards = Pipeline(1, 1, pipeline.microbatches) if pipeline.breadth_first else pipeline
    return HiddenOps(
        hidden_ops(pipeline, stage, num_layers, items_in_training(pipeline)[stage], sections),
        hidden_ops(forwards, stage, num_layers, items_in_evaluation(forwards)[stage], sections),
    )


def hidden_ops(pipeline: Pipeline, stage: int, num_layers: int, items: Sequence[Item], sections: int) -> list[LayerOp]:
    """Every writing ("F") and reading ("B") of a section.

    `layer` counts the times that the hidden states of a microbatch, or their gradients, have been written, on whatever
    stage, n = num_layers:

        written by    embedding   layer i   loss, forward   loss, backward   layer i, backward
        as            0           i + 1     n + 1           n + 2            2 n + 2 - i
        read by       layer 0     the next layer, the loss: forward, then backward, layers downward, the embedding

    A meeting with another stage reads what its `sent` has written, there, and writes the same, here. The forward of the
    loss writes what it has read for its backward. Where no item is a backward, it only reads. A writer writes each
    section after it has read that one.
    """
    writer = _Writer(num_layers, sections, trains=any(isinstance(item, Action) and item.kind == "B" for item in items))

    def alike(item: Item) -> object:
        return (item.kind, item.chunk) if pipeline.breadth_first and isinstance(item, Action) else item

    for _, group in groupby(items, key=alike):
        same = list(group)
        for item in same:
            if isinstance(item, Meeting):
                at = item.sent if item.source == stage else item.awaited
                writer.meet(at, pipeline.layers(stage, at.chunk, num_layers), reads=item.source == stage)
        writer.act([item for item in same if isinstance(item, Action)], pipeline, stage)
    return writer.found


class _Writer:
    """Collects the operations of a stage."""

    def __init__(self, num_layers: int, sections: int, trains: bool) -> None:
        self.num_layers, self.sections, self.trains = num_layers, sections, trains
        self.end = 2 * num_layers + 2
        self.found: list[LayerOp] = []

    def meet(self, at: Action, layers: range, reads: bool) -> None:
        """Of the chunk that has `layers`: a forward's input or output, or those of a backward."""
        below, above = layers.start, layers.stop
        made, needed = (above, below) if at.kind == "F" else (self.end - below, self.end - above)
        place = made if reads else needed
        self._move(at.microbatch, place if reads else None, None if reads else place)

    def act(self, actions: Sequence[Action], pipeline: Pipeline, stage: int) -> None:
        """All modules of an action, one after the other; of several microbatches that pass together each one of all."""
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
            for microbatch in microbatches if ends_here else ():
                self._move(microbatch, self.num_layers, self.num_layers + 1 if self.trains else None)
                if pipeline.breadth_first:
                    self._loss_backward(microbatch)
            return
        if ends_here and not pipeline.breadth_first:
            self._loss_backward(microbatches[0])
        for layer in reversed(layers):
            self._move_all(microbatches, self.end - layer - 1, self.end - layer, "B")
        if layers.start == 0:
            self._move_all(microbatches, self.end, None)

    def _loss_backward(self, microbatch: int) -> None:
        self._move(microbatch, self.num_layers + 1, self.num_layers + 2)

    def _move_all(self, microbatches: Sequence[int], read: int | None, written: int | None, kind: Kind = "F") -> None:
        for microbatch in microbatches:
            self._move(microbatch, read, written, kind)

    def _move(self, microbatch: int, read: int | None, written: int | None, kind: Kind = "F") -> None:
        """`kind` "B": of a layer's backward, which begins with the last section."""
        order = range(self.sections)
        for section in order if kind == "F" else reversed(order):
            if read is not None:
                self.found.append(LayerOp("B", microbatch, read, section))
            if written is not None:
                self.found.append(LayerOp("F", microbatch, written, section))


def most_hidden_states(pipeline: Pipeline, stage: int) -> int:
    """The most hidden states, or gradients of such, of one microbatch each, that a stage has at once.

    They wait between two modules of an action, for an action, or for the stage that they are sent to.
    """
    if pipeline.breadth_first:
        return pipeline.microbatches  # between two layers
    if pipeline.chunks == 1:
        return min(2, pipeline.microbatches) if stage else 1
    # More chunks, or microbatches, only repeat what two of the former, and two a stage of the latter, do.
    return _most_at_once(Pipeline(pipeline.stages, 2, min(pipeline.microbatches, 2 * pipeline.stages)), stage)


@lru_cache(maxsize=256)
def _most_at_once(pipeline: Pipeline, stage: int) -> int:
    """In training, which holds no fewer than an evaluation."""
    ops = hidden_ops(pipeline, stage, pipeline.stages * pipeline.chunks, items_in_training(pipeline)[stage], 1)
    return max(accumulate(1 if op.kind == "F" else -1 for op in ops))

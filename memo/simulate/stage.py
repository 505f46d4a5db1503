"""One stage at work: its actions become layers on the streams of its swap plan, and reductions beside them."""

from collections.abc import Callable

from memo.parallel.schedule import Action
from memo.simulate.model import StepModel
from memo.simulate.streams import StageStreams

Record = Callable[[str, str, float, float], None]
"""(row, name, start, end): told about every piece of work."""


class Stage:
    """Executes actions in the order of the swap plan that `streams` runs."""

    def __init__(self, index: int, model: StepModel, streams: StageStreams, record: Record | None = None) -> None:
        self.index, self.model, self.streams, self.record = index, model, streams, record
        self.update = model.updates[index]
        self._last_microbatch = model.pipeline.microbatches - 1
        self._data_free_s = 0.0

    def execute(self, action: Action, ready_s: float) -> float:
        """All layers of an action, and the ends of the model that it has; returns the end."""
        embedding = ("embedding", self.model.embedding_s(self.index, action))
        loss = ("loss", self.model.loss_s(self.index, action))
        before, after = (embedding, loss) if action.kind == "F" else (loss, embedding)
        end_s = self._work(before, action, ready_s)
        for _ in range(self.model.layers_per_chunk):
            end_s = self._layer(action, end_s)
        return self._work(after, action, end_s)

    def finish_reduction(self, computed_s: float) -> float:
        """What is left of the reduction of gradients when the last backward has ended; returns its end."""
        if not self.update.overlaps:
            self._data("reduce layers", computed_s, self.model.layers_per_stage * self.update.bucket_s)
        return max(computed_s, self._data("reduce ends", computed_s, self.update.rest_s))

    def optimize(self, ready_s: float) -> float:
        """The optimizer, then the new weights from all shards; returns the end of the step."""
        end_s = ready_s + self.update.optimizer_s
        if self.record:
            self.record("compute", "optimizer", ready_s, end_s)
        return self._data("gather weights", end_s, self.update.gather_s)

    def _layer(self, action: Action, ready_s: float) -> float:
        step, start_s, end_s, copies = self.streams.next_op(ready_s)
        if self.record:
            self.record("compute", str(step.op), start_s, end_s)
            for copy in copies:
                if copy.end_s > copy.start_s:  # where nothing moves, the plan still has its steps
                    self.record(copy.row, f"{copy.step.op.microbatch}:{copy.step.op.layer}", copy.start_s, copy.end_s)
        end_s = self.streams.free["compute"]
        if action.kind == "B" and action.microbatch == self._last_microbatch and self.update.overlaps:
            self._data(f"reduce layer {step.op.layer}", end_s, self.update.bucket_s)
        return end_s

    def _work(self, work: tuple[str, float], action: Action, ready_s: float) -> float:
        name, duration_s = work
        if not duration_s:
            return ready_s
        start_s = max(ready_s, self.streams.free["compute"])
        end_s = self.streams.free["compute"] = start_s + duration_s
        if self.record:
            self.record("compute", f"{name} {action}", start_s, end_s)
        return end_s

    def _data(self, name: str, ready_s: float, duration_s: float) -> float:
        start_s = max(ready_s, self._data_free_s)
        self._data_free_s = start_s + duration_s
        if duration_s and self.record:
            self.record("data", name, start_s, self._data_free_s)
        return self._data_free_s

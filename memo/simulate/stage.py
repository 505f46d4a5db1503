"""Simulates one stage: its actions run as layers on the streams of its swap plan, and reductions run beside them."""

from collections.abc import Callable, Sequence
from functools import partial

from memo.simulate.model import StepModel
from memo.simulate.resources import Record, Resources
from memo.simulate.state_streams import StateStreams
from memo.simulate.state_traffic import stage_state_plan
from memo.simulate.streams import LayerTimes, StageStreams
from memo.simulate.swapping import stage_plan
from memo.spec.clock import Clock, run
from memo.spec.schedule import Action, Pipeline

Recorder = Callable[[int, str, str, float, float], None]
"""Called as (stage, row, name, start, end) for every piece of work."""


def run_stages(model: StepModel, pipeline: Pipeline, record: Recorder | None = None) -> tuple[list["Stage"], Clock]:
    """Run all microbatches of `pipeline` on all stages, up to the last backward of each stage."""
    stages = [Stage(stage, model, pipeline, record and partial(record, stage)) for stage in range(pipeline.stages)]
    clock = run(
        model.program(pipeline),
        lambda stage, op, ready_s: stages[stage].execute(op.executed_action, ready_s),
        model.message_s,
    )
    return stages, clock


def update_stages(stages: Sequence["Stage"], clock: Clock) -> tuple[float, float]:
    """Run the end of a step; return (when all gradients are reduced, when all stages have updated their weights)."""
    reduced_s = max(stage.finish_reduction(ends[-1]) for stage, ends in zip(stages, clock.ends, strict=True))
    # The norm of the gradients is that of the whole model, so all stages wait for each other.
    return reduced_s, max(stage.optimize(reduced_s) for stage in stages)


def microbatch_s(times: LayerTimes, num_layers: int) -> float:
    """Return the seconds of the layers of one microbatch on a single stage, with their waits for copies.

    Its copies find all streams idle, so no microbatch of a step takes less, whatever else is copied.
    """
    streams = StageStreams(stage_plan(Pipeline(1, 1, 1), 0, num_layers), times)
    for _ in streams.plan.steps:
        streams.next_op(0.0)
    return streams.free["compute"]


class Stage:
    """Executes the actions of a stage, in the order of its swap plan."""

    def __init__(self, index: int, model: StepModel, pipeline: Pipeline, record: Record | None = None) -> None:
        self.index, self.model, self.record = index, model, record
        rows, times = Resources(model.times.copies_overlap), model.states[index]
        self.update, self.states = model.updates[index], None
        if times is not None:
            self.states = StateStreams(times, stage_state_plan(pipeline, index, times.placement), rows, record)
        plan = stage_plan(pipeline, index, model.num_layers)
        self.streams = StageStreams(plan, model.times, rows, self.states)
        self._last_microbatch = pipeline.microbatches - 1
        self._waiting: list[int] = []  # layers whose own gradients are complete and not reduced yet
        self._ends_there_s = 0.0  # when the gradients of embedding and head are in host memory

    def execute(self, action: Action, ready_s: float) -> float:
        """Run all layers of an action, and the embedding or loss if it has them; return when the action ends."""
        embedding = ("embedding", self.model.embedding_s(self.index, action))
        loss = ("loss", self.model.loss_s(self.index, action))
        before, after = (embedding, loss) if action.kind == "F" else (loss, embedding)
        end_s = self._work(before, action, ready_s)
        for _ in range(self.model.layers_per_chunk):
            end_s = self._layer(action, end_s)
        return self._work(after, action, end_s)

    def finish_reduction(self, computed_s: float) -> float:
        """Reduce the gradients that are left when the last backward has ended.

        Returns when they are reduced and all gradients for updates on the host are in host memory."""
        if self.states is not None:
            computed_s = max(computed_s, self.states.finish_gradients())
        for layer in self._waiting:
            self._reduce(layer, computed_s)
        reduced_s = max(computed_s, self._data("reduce ends", computed_s, self.update.rest_s)) + self.update.replicas_s
        if self.states is None:
            return reduced_s
        self._ends_there_s = self.states.bring_ends(reduced_s)
        return max(reduced_s, self._ends_there_s, *self.states.arrivals.values(), self.streams.free["data"])

    def optimize(self, ready_s: float) -> float:
        """Run the optimizer, then gather the new weights from all shards; return the end of the step."""
        end_s = ready_s + self.update.optimizer_s
        if self.record:
            self.record("compute", "optimizer", ready_s, end_s)
        host_s = 0.0 if self.states is None else self.states.finish_updates(ready_s, self._ends_there_s)
        updates_ends = self.states is not None and self.states.times.ends_update_s > 0
        gathered_s = self._data("gather weights", max(end_s, host_s) if updates_ends else end_s, self.update.gather_s)
        return max(host_s, end_s, gathered_s)

    def _layer(self, action: Action, ready_s: float) -> float:
        step, start_s, end_s, copies = self.streams.next_op(ready_s)
        if self.record:
            self.record("compute", str(step.op), start_s, end_s)
            for copy in copies:
                if copy.end_s > copy.start_s:  # if nothing moves, the plan still has the steps of its copies
                    self.record(copy.row, f"{copy.step.op.microbatch}:{copy.step.op.layer}", copy.start_s, copy.end_s)
        end_s = self.streams.free["compute"]
        if action.kind == "B" and action.microbatch == self._last_microbatch:
            if self.states is not None and self.states.drives(step.op.layer):
                return end_s
            if self.update.overlaps:
                self._reduce(step.op.layer, end_s)
            else:
                self._waiting.append(step.op.layer)
        return end_s

    def _reduce(self, layer: int, ready_s: float) -> None:
        self._data(f"reduce layer {layer}", ready_s, self.update.bucket_s)

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
        start_s, end_s = self.streams.rows.take("data", ready_s, duration_s)
        if duration_s and self.record:
            self.record("data", name, start_s, end_s)
        return end_s

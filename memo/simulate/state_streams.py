"""Simulates the copies of a stage's state plan beside the layers: weights and gradients go into slots and out of them.

    compute    | F0        | F1        | F2        | ...     | B2        | B1        |
    h2d          W1 -> b     W2 -> a     W3 -> b               W1 -> b     W0 -> a          (weights, two slots)
    dp           gather W1   gather W2   ...                   .. | reduce 2  | reduce 1
    d2h                                                             | G2        | G1        (gradients, two slots)

`memo.planner.state_plan` decides the order of copies; the waits are those of `memo.executor.states`:

- a copy into a slot waits until the last user of the slot has ended, or until the content of the slot has left;
- an operation waits for the copies into its slots;
- the first use of a layer in a step waits for the update of its masters on the CPU, which the step before has begun;
- a reduction starts when a backward has ended, and is waited for when the next operation has ended.
"""

from dataclasses import dataclass
from typing import NamedTuple

from memo.planner.state_plan import Fetch, StatePlan, StateStep
from memo.simulate.resources import Record, Resources
from memo.simulate.states import StateTimes
from memo.spec.placement import NUM_STATE_SLOTS


@dataclass(slots=True)
class _Slot:
    """Times of one slot: its content may be used from `filled_s` on, and be overwritten from `free_s` on."""

    filled_s: float = 0.0
    free_s: float = 0.0


class _Reduction(NamedTuple):
    """The reduction of one layer's gradient, begun when its backward ended.

    Attributes:
        slot: the slot of the gradient; None if the gradient stays on the device.
        shard: index of the buffer for the shard of this rank; it is free again when the shard has left.
        sum_s: when the sum of earlier microbatches, to which the shard is added, is on the device.
    """

    step: StateStep
    reduced_s: float
    slot: _Slot | None
    shard: int
    sum_s: float


class StateStreams:
    """Executes the steps of a state plan on the rows that activations use too."""

    def __init__(self, times: StateTimes, plan: StatePlan, rows: Resources, record: Record | None = None) -> None:
        self.times, self.plan, self.rows, self.record = times, plan, rows, record
        order = sorted({step.op.layer for step in plan.steps})
        self._places = {layer: times.placement.of_layer(position) for position, layer in enumerate(order)}
        self._on_host = {layer for layer, at in self._places.items() if at.optimizer_on_host}
        self._weights = [_Slot() for _ in range(plan.num_weight_slots)]
        self._gradients = [_Slot() for _ in range(plan.num_gradient_slots)]
        self._shard_free_s = [0.0] * NUM_STATE_SLOTS
        self._num_reduced = 0
        self._sum_free_s = 0.0  # when the buffer is free into which a shard comes back to be added to
        self._pending: _Reduction | None = None
        self._away_s: dict[int, float] = {}  # by layer: when its accumulated gradient is in host memory
        self.arrivals: dict[int, float] = {}  # by layer: when its reduced gradient is in host memory
        self.updated: dict[int, float] = {}  # by layer: when the CPU has updated it, without clipping
        # By layer, until its first use: when the CPU has updated it after the step before.
        self._masters_s = {layer: 0.0 for layer in plan.by_first_need if layer in self._on_host}
        if times.clips:
            for layer in self._masters_s:
                self._masters_s[layer] = self._work("cpu", 0.0, times.update_s, "update", layer)
        self._steps = iter(plan.steps)

    def drives(self, layer: int) -> bool:
        """Return whether this class reduces and moves the layer's gradient."""
        return self._places[layer].is_driven

    def begin(self) -> float:
        """Issue the copies before the next operation; return when its weights and its gradient's slot are ready."""
        self._step = step = next(self._steps)
        ready_s = self._receive(step.op.layer)
        for fetch in step.fetches:
            updated_s = self._masters_s.get(fetch.layer, 0.0)
            ready_s = max(ready_s, updated_s)  # the host issues nothing before
            self._fetch(fetch, updated_s)
        if step.weight_slot is not None:
            ready_s = max(ready_s, self._weights[step.weight_slot].filled_s)
        if step.gradient_slot is not None:
            slot = self._gradients[step.gradient_slot]
            self._settle(slot)
            if step.start != "kept":
                ready_s = max(ready_s, slot.free_s if step.start == "zero" else slot.filled_s)
        return ready_s

    def end(self, end_s: float) -> None:
        """Free the slots of an operation that has ended, and start to reduce or offload its gradient."""
        step = self._step
        if step.weight_slot is not None:
            self._weights[step.weight_slot].free_s = end_s
        if self._pending is not None:
            self.finish_gradients()
        slot = None if step.gradient_slot is None else self._gradients[step.gradient_slot]
        if step.end == "reduce":
            self._start_reduction(step, slot, end_s)
        elif step.end == "offload" and slot is not None:
            offloaded_s = self._work("offload", end_s, self.times.whole_out_s, "gradient", step.op.layer)
            self._away_s[step.op.layer] = slot.free_s = offloaded_s

    def finish_gradients(self) -> float:
        """Wait for the pending reduction, and move its shard to where the masters are; return when it ended."""
        pending, self._pending = self._pending, None
        if pending is None:
            return 0.0
        times, step, layer = self.times, pending.step, pending.step.op.layer
        ready_s = max(pending.reduced_s, pending.sum_s)
        free_s = gone_s = self._hold_compute(ready_s)
        if layer in self._on_host:
            if step.adds_up:
                self._sum_free_s = free_s
            if step.is_last:
                gone_s = self._bring(layer, ready_s)
            else:
                gone_s = self._work("offload", ready_s, times.shard_out_s, "gradient", layer)
            self._away_s[layer] = gone_s
        if pending.slot is not None:
            pending.slot.free_s = free_s if times.scatter_s else gone_s
        self._shard_free_s[pending.shard] = gone_s
        return pending.reduced_s

    def bring_ends(self, reduced_s: float) -> float:
        """Offload the reduced gradients of embedding and head; return when they are in host memory."""
        return self._work("offload", reduced_s, self.times.ends_out_s, "gradients of ends")

    def finish_updates(self, ready_s: float, ends_ready_s: float) -> float:
        """Run AdamW of embedding and head on the CPU, and copy their new weights to the device; return the end.

        With clipping, layers are updated while the next step begins. Without it they are updated as their gradients
        arrive, and the step ends when all are.

        Args:
            ready_s: when all gradients of the model are clipped.
            ends_ready_s: when the gradients of embedding and head are in host memory.
        """
        times, end_s = self.times, max(self.updated.values(), default=0.0)
        if times.ends_update_s:
            updated_s = self._work("cpu", max(ready_s, ends_ready_s), times.ends_update_s, "update ends")
            end_s = max(end_s, self._work("prefetch", updated_s, times.ends_upload_s, "weights of ends"))
        return end_s

    def _receive(self, layer: int) -> float:
        """Before a use of a layer: copy its new weights to the device if they stay whole; return when they arrive."""
        updated_s = self._masters_s.pop(layer, None)
        if updated_s is None or self._places[layer].weights_in_slot:
            return updated_s or 0.0
        uploaded_s = self._work("prefetch", updated_s, self.times.upload_s, "weights", layer)
        return self._work("data", uploaded_s, self.times.gather_s, "gather", layer)

    def _fetch(self, fetch: Fetch, updated_s: float) -> None:
        times, layer = self.times, fetch.layer
        if fetch.kind == "gradient":
            slot = self._gradients[fetch.slot]
            self._settle(slot)
            ready_s = max(slot.free_s, self._away_s[layer])
            slot.filled_s = self._work("prefetch", ready_s, times.whole_in_s, "gradient", layer)
            return
        slot = self._weights[fetch.slot]
        ready_s = max(slot.free_s, updated_s)
        if layer in self._on_host:
            ready_s = self._work("prefetch", ready_s, times.fill_s, "weights", layer)
        slot.filled_s = self._work("data", ready_s, times.gather_s, "gather", layer)

    def _settle(self, slot: _Slot) -> None:
        """Wait for the reduction of the slot's content before the slot is overwritten."""
        if self._pending is not None and self._pending.slot is slot:
            self.finish_gradients()

    def _start_reduction(self, step: StateStep, slot: _Slot | None, end_s: float) -> None:
        shard = self._num_reduced % NUM_STATE_SLOTS
        self._num_reduced += 1
        ready_s = end_s
        if self.times.scatter_s:
            ready_s = self._hold_compute(max(end_s, self._shard_free_s[shard]))
        layer, sum_s = step.op.layer, 0.0
        if step.adds_up and layer in self._on_host:
            asked_s = max(self._sum_free_s, self._away_s[layer])
            sum_s = self._work("prefetch", asked_s, self.times.shard_in_s, "gradient", layer)
        reduced_s = self._work("data", ready_s, self.times.scatter_s, "reduce", layer)
        self._pending = _Reduction(step, reduced_s, slot, shard, sum_s)
        if not self.times.scatter_s:  # a single rank has no message to wait for
            self.finish_gradients()

    def _bring(self, layer: int, ready_s: float) -> float:
        """Offload a reduced gradient, and without clipping start its update; return when it is in host memory."""
        times, count = self.times, len(self.arrivals)
        if times.rings and count >= NUM_STATE_SLOTS:  # the update of the layer that used the record before
            ready_s = max(ready_s, list(self.updated.values())[count - NUM_STATE_SLOTS])
        self.arrivals[layer] = self._work("offload", ready_s, times.shard_out_s, "gradient", layer)
        if not times.clips:
            self.updated[layer] = self._work("cpu", self.arrivals[layer], times.update_s, "update", layer)
        return self.arrivals[layer]

    def _hold_compute(self, until_s: float) -> float:
        """Let the compute stream wait until a time; return this time."""
        if until_s > self.rows.free["compute"]:
            self.rows.free["compute"] = until_s
        return until_s

    def _work(self, row: str, ready_s: float, duration_s: float, *name: object) -> float:
        """Return the end of work on a row. The words of its name are joined only to be recorded."""
        if not duration_s:
            return ready_s
        start_s, end_s = self.rows.take(row, ready_s, duration_s)
        if self.record:
            self.record(row, " ".join(map(str, name)), start_s, end_s)
        return end_s

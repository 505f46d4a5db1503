"""Weights and gradients of one stage in their slots: when they arrive and leave, beside the layers.

    compute    | F0        | F1        | F2        | ...     | B2        | B1        |
    h2d          W1 -> b     W2 -> a     W3 -> b               W1 -> b     W0 -> a          (weights, two slots)
    dp           gather W1   gather W2   ...                   .. | reduce 2  | reduce 1
    d2h                                                             | G2        | G1        (gradients, two slots)

The next user of a weight slot is fetched as soon as its user ends; a slot that the layer before uses is never taken, of
others the one that is needed last (Belady). A gradient slot is free once its content is reduced and away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from memo.simulate.rows import Record, Rows
from memo.simulate.states import StateTimes
from memo.spec.layer_ops import LayerOp
from memo.spec.placement import NUM_STATE_SLOTS, LayerPlaces


@dataclass(frozen=True)
class WeightStep:
    """One operation of a layer whose weights come and go.

    Attributes:
        fills: the weights are not in the slot yet.
        next_fill: operation whose weights are fetched into the slot as soon as this one ends.
    """

    slot: int
    fills: bool
    next_fill: int | None = None


def weight_steps(keys: Sequence[int | None], num_slots: int = NUM_STATE_SLOTS) -> list[WeightStep | None]:
    """Slots for a sequence of operations; `keys`: which layer's weights each needs in a slot, None for none."""
    uses: dict[int, list[int]] = {}
    for index in reversed(range(len(keys))):
        key = keys[index]
        if key is not None:
            uses.setdefault(key, []).append(index)
    content: list[int | None] = [None] * num_slots
    last_user: list[int] = [-2] * num_slots
    found: list[tuple[int, bool] | None] = []
    follower: dict[int, int] = {}
    for index, key in enumerate(keys):
        if key is None:
            found.append(None)
            continue
        uses[key].pop()
        fills = key not in content
        if fills:
            free = [slot for slot in range(num_slots) if last_user[slot] != index - 1] or list(range(num_slots))
            slot = max(free, key=lambda slot: _next_use(uses, content[slot], len(keys)))
            follower[last_user[slot]] = index
            content[slot] = key
        else:
            slot = content.index(key)
        last_user[slot] = index
        found.append((slot, fills))
    return [None if step is None else WeightStep(*step, follower.get(i)) for i, step in enumerate(found)]


def _next_use(uses: dict[int, list[int]], key: int | None, never: int) -> int:
    if key is None:
        return never + 1
    return uses[key][-1] if uses[key] else never


class StateStreams:
    """States of the layers of `ops`, one stage in schedule order, on the rows that activations use too."""

    def __init__(self, times: StateTimes, ops: Sequence[LayerOp], microbatches: int, rows: Rows) -> None:
        self.times, self.ops, self.rows, self.microbatches = times, ops, rows, microbatches
        self.record: Record | None = None
        order = sorted({op.layer for op in ops})
        self._places = {layer: times.places[index] for index, layer in enumerate(order)}
        self._steps = weight_steps([op.layer if self._of(op).weights_in_slot else None for op in ops])
        self._weights_s: dict[int, float] = {}  # by operation: when its weights are there
        self._slotted = [i for i, op in enumerate(ops) if op.kind == "B" and self._of(op).gradients_in_slot]
        self._num_back = 0
        self._gradient_slot_s = [0.0] * NUM_STATE_SLOTS
        self._shard_s = [0.0] * NUM_STATE_SLOTS
        self._away_s: dict[int, float] = {}  # by layer: when its gradient so far is in host memory
        self.arrivals: dict[int, float] = {}  # by layer: when its reduced gradient is in host memory
        self.updated: dict[int, float] = {}  # by layer: when the CPU has updated it
        self._index = 0

    def _of(self, op: LayerOp) -> LayerPlaces:
        return self._places[op.layer]

    def ready_s(self) -> float:
        """When the next operation has its weights, and room for its gradients."""
        op, index = self.ops[self._index], self._index
        if index == 0:
            self._begin()
        ready_s = self._weights_s.pop(index, 0.0)
        if op.kind == "B" and self._of(op).gradients_in_slot:
            ready_s = max(ready_s, self._gradient_slot_s[self._num_back % NUM_STATE_SLOTS])
        return ready_s

    def _begin(self) -> None:
        """What the first users of each slot need comes at once."""
        firsts: set[int] = set()
        for index, step in enumerate(self._steps):
            if step is not None and step.fills and step.slot not in firsts:
                firsts.add(step.slot)
                self._fill(index, 0.0)
        self._prepare_gradients(range(NUM_STATE_SLOTS))

    def finish(self, end_s: float) -> None:
        """The next operation has ended: its slots are for others."""
        op, step = self.ops[self._index], self._steps[self._index]
        self._index += 1
        if step is not None and step.next_fill is not None:
            self._fill(step.next_fill, end_s)
        if op.kind == "B" and self._of(op).gradients_in_slot:
            self._leave(op, self._num_back % NUM_STATE_SLOTS, end_s)
            self._num_back += 1
            self._prepare_gradients([self._num_back + NUM_STATE_SLOTS - 1])

    def is_reduced_in_slot(self, layer: int) -> bool:
        return self._places[layer].gradients_in_slot

    def is_on_host(self, layer: int) -> bool:
        return self._places[layer].optimizer_on_host

    def arrive(self, layer: int, reduced_s: float) -> None:
        """The reduced gradient of a layer that keeps its own goes to where it is updated."""
        if self.is_on_host(layer):
            self._bring(layer, reduced_s)

    def bring_ends(self, reduced_s: float) -> float:
        """The same of embedding and head; returns when they are there."""
        return self._work("offload", "gradients of ends", reduced_s, self.times.ends_out_s)

    def update_on_host(self, ready_s: float, ends_ready_s: float) -> float:
        """AdamW on the CPU, layer after layer as gradients came; new weights follow where they stay whole.

        Args:
            ready_s: when all gradients of the model are clipped; counts only where they are.
            ends_ready_s: when those of embedding and head are in host memory.
        """
        times, end_s = self.times, 0.0
        if times.clips:
            order = sorted(self.arrivals, key=lambda layer: self.arrivals[layer])
            self.updated = {layer: self._work("cpu", f"update {layer}", ready_s, times.update_s) for layer in order}
        for layer, updated_s in self.updated.items():
            if not self._places[layer].weights_in_slot:
                uploaded_s = self._work("prefetch", f"weights {layer}", updated_s, times.upload_s)
                updated_s = self._work("data", f"gather {layer}", uploaded_s, times.gather_s)
            end_s = max(end_s, updated_s)
        if times.ends_update_s:
            updated_s = self._work("cpu", "update ends", max(ready_s, ends_ready_s), times.ends_update_s)
            end_s = max(end_s, self._work("prefetch", "weights of ends", updated_s, times.ends_upload_s))
        return end_s

    def _fill(self, index: int, ready_s: float) -> None:
        op, times = self.ops[index], self.times
        if self._of(op).optimizer_on_host:
            ready_s = self._work("prefetch", f"weights {op.layer}", ready_s, times.fill_s)
        self._weights_s[index] = self._work("data", f"gather {op.layer}", ready_s, times.gather_s)

    def _prepare_gradients(self, order: Sequence[int]) -> None:
        """What other microbatches left comes into the slot before it is added to."""
        for position in order:
            if position < len(self._slotted) and self.times.whole_in_s:
                op, slot = self.ops[self._slotted[position]], position % NUM_STATE_SLOTS
                if op.microbatch > 0:
                    ready_s = max(self._gradient_slot_s[slot], self._away_s.get(op.layer, 0.0))
                    name = f"gradient {op.layer}"
                    self._gradient_slot_s[slot] = self._work("prefetch", name, ready_s, self.times.whole_in_s)

    def _leave(self, op: LayerOp, slot: int, end_s: float) -> None:
        times, is_last = self.times, op.microbatch == self.microbatches - 1
        if not (is_last or times.reduces_each):
            self._away_s[op.layer] = self._work("offload", f"gradient {op.layer}", end_s, times.whole_out_s)
            self._gradient_slot_s[slot] = self._away_s[op.layer]
            return
        ready_s = max(end_s, self._shard_s[slot]) if times.scatter_s else end_s
        reduced_s = free_s = self._work("data", f"reduce {op.layer}", ready_s, times.scatter_s)
        if self._of(op).optimizer_on_host:
            if times.reduces_each and op.microbatch > 0:
                there_s = max(reduced_s, self._away_s.get(op.layer, 0.0))
                reduced_s = self._work("prefetch", f"gradient {op.layer}", there_s, times.shard_in_s)
            if is_last:
                left_s = self._bring(op.layer, reduced_s)
            else:
                left_s = self._work("offload", f"gradient {op.layer}", reduced_s, times.shard_out_s)
            self._away_s[op.layer] = self._shard_s[slot] = left_s
            free_s = free_s if times.scatter_s else left_s
        self._gradient_slot_s[slot] = free_s

    def _bring(self, layer: int, ready_s: float) -> float:
        """The reduced gradient to host memory, where without clipping the CPU is next; returns when it is there."""
        times, count = self.times, len(self.arrivals)
        if times.rings and count >= NUM_STATE_SLOTS:  # of the layers before, that which had the record
            ready_s = max(ready_s, list(self.updated.values())[count - NUM_STATE_SLOTS])
        self.arrivals[layer] = self._work("offload", f"gradient {layer}", ready_s, times.shard_out_s)
        if not times.clips:
            self.updated[layer] = self._work("cpu", f"update {layer}", self.arrivals[layer], times.update_s)
        return self.arrivals[layer]

    def _work(self, row: str, name: str, ready_s: float, duration_s: float) -> float:
        start_s, end_s = self.rows.take(row, ready_s, duration_s)
        if duration_s and self.record:
            self.record(row, name, start_s, end_s)
        return end_s if duration_s else ready_s

"""Simulates the three streams of one stage under its swap plan: when layers compute and copies run.

The waits are those of `memo.executor.swapper`: a forward waits until the last content of its slot has left, and a
backward waits until its own content has arrived. Each copy stream works in order, and a record is overwritten only
after it was read. The copy of a record on disk lasts as long as the slower of link and disk takes; the disk serves one
record at a time.
"""

from dataclasses import dataclass
from operator import sub
from typing import Literal, NamedTuple

from memo.planner.disk_plan import longest_waiting
from memo.planner.swap import SwapPlan, SwapStep
from memo.simulate.resources import Resources
from memo.simulate.state_streams import StateStreams
from memo.spec.schedule import Kind

CopyRow = Literal["offload", "prefetch", "disk"]


class LayerTimes(NamedTuple):
    """Seconds of one layer: compute, averaged over all layers, and the copies of its moved activations.

    Without `copies_overlap` compute stands still while a copy runs (CPU).

    Attributes:
        write_s, read_s: seconds in which a disk writes and reads the moved activations of a layer; 0 without a disk.
        layers_in_memory: records in host memory; all further records are on the disk.
        by_layer: forward and backward of each layer of the model if it has several kinds of layer; else empty.
    """

    forward_s: float
    backward_s: float
    offload_s: float = 0.0
    prefetch_s: float = 0.0
    copies_overlap: bool = True
    write_s: float = 0.0
    read_s: float = 0.0
    layers_in_memory: int = 0
    by_layer: tuple[tuple[float, float], ...] = ()

    def computed_s(self, kind: Kind, layer: int) -> float:
        """Return the seconds of forward or backward of one layer."""
        if self.by_layer:
            return self.by_layer[layer][kind == "B"]
        return self.forward_s if kind == "F" else self.backward_s

    def of_stack(self, by_layer: tuple[tuple[float, float], ...]) -> "LayerTimes":
        """Return the times of all layers, given those of the fastest layer in `self`.

        `by_layer` has the seconds of each layer without recomputation; differences between layers stay as they are."""
        if not by_layer:
            return self
        less_s = tuple(map(sub, (self.forward_s, self.backward_s), min(by_layer)))
        found = tuple((forward_s + less_s[0], backward_s + less_s[1]) for forward_s, backward_s in by_layer)
        forward_s, backward_s = (sum(seconds) / len(found) for seconds in zip(*found, strict=True))
        return self._replace(forward_s=forward_s, backward_s=backward_s, by_layer=found)

    @property
    def least_s(self) -> tuple[float, float]:
        """Seconds of forward and backward of the fastest layer."""
        return min(self.by_layer, default=(self.forward_s, self.backward_s))

    @property
    def slowest_offload_s(self) -> float:
        """Seconds of an offload through the disk, if there is one; staging buffers, which let the disk lag behind, are
        ignored."""
        return max(self.offload_s, self.write_s)

    @property
    def slowest_prefetch_s(self) -> float:
        return max(self.prefetch_s, self.read_s)

    def num_on_disk(self, num_records: int) -> int:
        """Return how many of a plan's records are on the disk."""
        return max(0, num_records - self.layers_in_memory) if self.write_s else 0


@dataclass(slots=True)
class Copy:
    """One copy of one layer operation's activations."""

    row: CopyRow
    step: SwapStep
    start_s: float
    end_s: float


class StageStreams:
    """Runs the steps of a plan in order; `next_op` is called once for every layer operation.

    Args:
        states: the streams of the weights and gradients of these operations; None if states do not stream.
    """

    def __init__(
        self, plan: SwapPlan, times: LayerTimes, rows: Resources | None = None, states: StateStreams | None = None
    ) -> None:
        self.plan, self.times, self.states = plan, times, states
        self.rows = rows or Resources(times.copies_overlap)
        self.free = self.rows.free
        self.slot_ready = [0.0] * plan.num_slots  # end of the last copy out of or into the slot
        self.record_ready = [0.0] * plan.num_records
        self.stall_s = 0.0
        self._moves = times.offload_s > 0 or times.prefetch_s > 0
        self._on_disk = set(longest_waiting(plan, times.num_on_disk(plan.num_records)))
        self._steps = iter(plan.steps)

    def next_op(self, ready_s: float) -> tuple[SwapStep, float, float, list[Copy]]:
        """Run the next layer operation, not before `ready_s`; return its step, start, end and the copies it issues."""
        step, free, states = next(self._steps), self.free, self.states
        duration_s = self.times.computed_s(step.op.kind, step.op.layer)
        could_start_s = start_s = max(ready_s, free["compute"])
        if states is not None:
            start_s = max(states.begin(), free["compute"], start_s)  # its first copies may hold compute up
        if self.slot_ready[step.slot] > start_s:
            start_s = self.slot_ready[step.slot]
        end_s = free["compute"] = start_s + duration_s
        self.stall_s += start_s - could_start_s
        copies = self._copies(step, end_s) if self._moves else []
        if states is not None:
            before_s = free["compute"]
            states.end(end_s)
            self.stall_s += free["compute"] - before_s
        return step, start_s, end_s, copies

    def _copies(self, step: SwapStep, computed_s: float) -> list[Copy]:
        copies = self._copy("offload", step, step, computed_s) if step.offload else []
        if step.next_prefetch is not None:
            ready_s = max(computed_s, self.slot_ready[step.slot])
            copies += self._copy("prefetch", step, self.plan.steps[step.next_prefetch], ready_s)
        return copies

    def _copy(self, row: CopyRow, step: SwapStep, moved: SwapStep, ready_s: float) -> list[Copy]:
        """Run a copy when its record is free, and the disk's read or write for it; return both."""
        assert moved.record is not None
        ready_s = max(ready_s, self.record_ready[moved.record])
        duration_s = self.times.offload_s if row == "offload" else self.times.prefetch_s
        copies = []
        if moved.record in self._on_disk:
            disk_s = self.times.write_s if row == "offload" else self.times.read_s
            ready_s, ready_again_s = self.rows.take("disk", ready_s, disk_s)
            copies.append(Copy("disk", moved, ready_s, ready_again_s))
            duration_s = max(duration_s, disk_s)
        before_s = self.free["compute"]
        start_s, end_s = self.rows.take(row, ready_s, duration_s)
        self.slot_ready[step.slot] = self.record_ready[moved.record] = end_s
        self.stall_s += self.free["compute"] - before_s
        copies.append(Copy(row, moved, start_s, end_s))
        return copies

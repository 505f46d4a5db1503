"""The three streams of one stage under its swap plan: when layers compute and copies run.

The waits are those of `memo.executor.swapper`: a forward waits until its slot's last content has left, a backward
until its own has arrived; each copy stream works in order, and a record is written only after it was read.
"""

from dataclasses import dataclass

from memo.planner.swap import SwapPlan, SwapStep


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of one layer: its compute, and the copy of what moves of it in each direction.

    Without `copies_overlap` compute stands still while a copy runs (CPU).
    """

    forward_s: float
    backward_s: float
    offload_s: float = 0.0
    prefetch_s: float = 0.0
    copies_overlap: bool = True


@dataclass(slots=True)
class Copy:
    """One copy of one layer operation's activations."""

    row: str
    step: SwapStep
    start_s: float
    end_s: float


class StageStreams:
    """Runs the steps of a plan in order; `next_op` is called once for every layer operation."""

    def __init__(self, plan: SwapPlan, times: LayerTimes) -> None:
        self.plan, self.times = plan, times
        self.free = {"compute": 0.0, "offload": 0.0, "prefetch": 0.0}
        self.slot_ready = [0.0] * plan.num_slots  # end of the last copy out of or into it
        self.record_ready = [0.0] * plan.num_records
        self.copy_s = 0.0
        self.stall_s = 0.0
        self._steps = iter(plan.steps)

    def next_op(self, ready_s: float) -> tuple[SwapStep, float, float, list[Copy]]:
        """The next layer operation, not before `ready_s`: its step, start and end, and the copies it issues."""
        step = next(self._steps)
        duration_s = self.times.forward_s if step.op.kind == "F" else self.times.backward_s
        could_start_s = max(ready_s, self.free["compute"])
        start_s = max(could_start_s, self.slot_ready[step.slot])
        end_s = self.free["compute"] = start_s + duration_s
        self.stall_s += start_s - could_start_s
        if not step.offload and step.next_prefetch is None:
            return step, start_s, end_s, []
        return step, start_s, end_s, self._copies(step, end_s)

    def _copies(self, step: SwapStep, computed_s: float) -> list[Copy]:
        copies = []
        if step.offload:
            assert step.record is not None
            copies.append(self._copy("offload", step, step, max(computed_s, self.record_ready[step.record])))
        if step.next_prefetch is not None:
            target = self.plan.steps[step.next_prefetch]
            assert target.record is not None
            ready_s = max(computed_s, self.slot_ready[step.slot], self.record_ready[target.record])
            copies.append(self._copy("prefetch", step, target, ready_s))
        return copies

    def _copy(self, row: str, step: SwapStep, moved: SwapStep, ready_s: float) -> Copy:
        assert moved.record is not None
        duration_s = self.times.offload_s if row == "offload" else self.times.prefetch_s
        start_s = max(self.free[row], ready_s)
        end_s = self.free[row] = self.slot_ready[step.slot] = self.record_ready[moved.record] = start_s + duration_s
        if not self.times.copies_overlap:
            self.stall_s += max(0.0, end_s - self.free["compute"])
            self.free["compute"] = max(self.free["compute"], end_s)
        self.copy_s += duration_s
        return Copy(row, moved, start_s, end_s)

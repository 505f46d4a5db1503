"""Simulates the times at which swept layers compute and copy, from their plans alone.

Sections, keys and values, inputs of layers that recompute attention, and hidden states have a plan each, and share the
streams. Their copies are issued in the order of the executor (memo.executor.sweep):

    forward    keys and values of the section: begin; hidden states: read; compute; hidden states: write; slot: end;
               keys and values: offload, and after the last section what follows
    backward   keys and values of all sections: begin, before the first; hidden states: read; compute; hidden states:
               write; keys and values of the section: end; slot: end

Embedding and loss take no time here, but their copies of hidden states do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from memo.planner.swap import SwapPlan, SwapStep, SweepPlans
from memo.report.timeline import Kind, Row, SwapSpan
from memo.simulate.resources import Resources
from memo.simulate.streams import Copy, LayerTimes, StageStreams
from memo.spec.layer_ops import LayerOp

_NOTHING = LayerTimes(0.0, 0.0)


@dataclass(frozen=True)
class SweepTimes:
    """Seconds of one section: its compute and its copies, and the further copies beside it.

    `LayerTimes.forward_s` and `backward_s` are read only of `sections`; `layers_in_memory` counts records.
    """

    sections: LayerTimes
    keys: LayerTimes = _NOTHING
    inputs: LayerTimes = _NOTHING
    hidden: LayerTimes = _NOTHING


class _Moves(StageStreams):
    """The copies of one plan, whose operations begin and end when the sections do."""

    def __init__(
        self,
        plan: SwapPlan,
        times: LayerTimes,
        rows: Resources,
        kind: Kind,
        spans: list[SwapSpan],
        part: int | None = None,
    ) -> None:
        super().__init__(plan, times, rows)
        self._kind, self._spans, self._part, self._at = kind, spans, part, 0

    @property
    def next_step(self) -> SwapStep | None:
        return self.plan.steps[self._at] if self._at < len(self.plan.steps) else None

    def begin(self) -> None:
        """Let compute wait until the slot of the next step is ready."""
        step, free = self._current, self.free
        if self.slot_ready[step.slot] > free["compute"]:
            self._span("wait", step, free["compute"], self.slot_ready[step.slot])
            free["compute"] = self.slot_ready[step.slot]

    def offload(self) -> None:
        """Offload the data that the step has written, before the step ends."""
        step = self._current
        if step.offload and self._moves:
            self._add(self._copy("offload", step, step, self.free["compute"]))

    def end(self, offloads: bool = True) -> None:
        step = self._current
        if offloads:
            self.offload()
        if self._moves:
            self._add(self._copies(replace(step, offload=False), self.free["compute"]))
        self._at += 1

    def pass_through(self) -> None:
        """Run a step that takes no time."""
        self.begin()
        self.end()

    @property
    def _current(self) -> SwapStep:
        return self.plan.steps[self._at]

    def _add(self, copies: list[Copy]) -> None:
        link: Row = next((copy.row for copy in copies if copy.row != "disk"), "offload")
        disk: Row = "write" if link == "offload" else "read"
        for copy in copies:
            self._span(disk if copy.row == "disk" else copy.row, copy.step, copy.start_s, copy.end_s)

    def _span(self, row: Row, step: SwapStep, start_s: float, end_s: float) -> None:
        if self._part is not None:
            step = replace(step, op=replace(step.op, section=self._part))
        self._spans.append(SwapSpan(row, step, start_s, end_s, kind=self._kind))


def simulate_sweep(plan: SwapPlan, beside: SweepPlans, times: SweepTimes, num_layers: int) -> list[SwapSpan]:
    """Simulate valid plans (memo.planner.swap.sweep_plans) on the streams of one stage, in the order of issue.

    Args:
        num_layers: number of layers of the model.
    """
    rows, spans = Resources(times.sections.copies_overlap), list[SwapSpan]()
    sections = _Moves(plan, times.sections, rows, "activations", spans)
    count = 1 + max((step.op.section or 0 for step in plan.steps), default=0)
    keys = [_Moves(beside.keys, times.keys, rows, "keys and values", spans, part) for part in range(count)]
    inputs = None if beside.inputs is None else _Moves(beside.inputs, times.inputs, rows, "layer inputs", spans)
    hidden = None if beside.hidden is None else _Moves(beside.hidden, times.hidden, rows, "hidden states", spans)
    again = _second_forwards(plan)
    for index, step in enumerate(plan.steps):
        op, section = step.op, step.op.section or 0
        hides = hidden if index not in again else None  # a second forward starts from the layer's own input
        if hides is not None:
            _catch_up(hides, op, num_layers)
        for each in _begun(keys, op, section, count):
            each.begin()
        sections.begin()
        if hides is not None:
            hides.pass_through()
        if inputs is not None and (op.discards or index in again):
            inputs.pass_through()
        start_s = rows.free["compute"]
        rows.free["compute"] += times.sections.forward_s if op.kind == "F" else times.sections.backward_s
        spans.append(SwapSpan("compute", step, start_s, rows.free["compute"]))
        if hides is not None:
            hides.pass_through()
        if op.kind == "B":
            keys[section].end()
            sections.end()
            continue
        sections.end()
        keys[section].offload()
        if section == count - 1:
            for each in keys:
                each.end(offloads=False)
    while hidden is not None and hidden.next_step is not None:
        hidden.pass_through()
    return spans


def _begun(keys: Sequence[_Moves], op: LayerOp, section: int, count: int) -> Sequence[_Moves]:
    if op.kind == "F":
        return [keys[section]]
    return keys if section == count - 1 else []


def _second_forwards(plan: SwapPlan) -> set[int]:
    """Return the indices of second forwards, which layers that recompute attention run directly before backward."""
    ops = [step.op for step in plan.steps]
    discarded = {replace(op, discards=False) for op in ops if op.discards}
    return {index for index, op in enumerate(ops) if op in discarded}


def _catch_up(hidden: _Moves, op: LayerOp, num_layers: int) -> None:
    """Run the reads and writes of embedding, loss and other stages before this section; see memo.spec.hidden_ops."""
    end = 2 * num_layers + 1
    read = op.layer if op.kind == "F" else end - op.layer - 1
    while (step := hidden.next_step) is not None:
        if step.op == LayerOp("B", op.microbatch, read, op.section):
            return
        hidden.pass_through()

"""The swap plan as data: the slot of each layer, and its copies between device and host in their order.

From the layer operations of one pipeline stage in schedule order, every operation is given a slot (one of
the rounding buffers of MEMO, section 4.1) and, where its activations must leave the slot before their backward
comes, a host record. One stage, four layers, one microbatch, time from left to right:

    compute   F0   F1          F2          F3   B3   B2           B1           B0
    slot 0    F0   offload 0   F2 - - - - - - - - -  B2           prefetch 0   B0
    slot 1         F1          offload 1   F3 - B3   prefetch 1   B1

Layers 2 and 3 never move: their backward comes while they are still in their slot.
`memo.planner.swap_validator` replays every plan independently; `memo.executor.swapper` obeys it.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

from memo.spec.hidden_ops import HiddenOps
from memo.spec.layer_ops import LayerOp, SweptOps
from memo.spec.schedule import Kind


@dataclass(frozen=True)
class SwapStep:
    """One layer operation with its copies.

    Before it, a forward waits until the last content of its slot is offloaded, and a backward with `prefetch` until its
    activations have arrived. Right after it come the offload into `record`, and then the prefetch for the slot's next
    user, the step with index `next_prefetch`.
    """

    op: LayerOp
    slot: int
    offload: bool = False
    """A forward whose activations go to `record`."""
    prefetch: bool = False
    """A backward whose activations come from `record`; otherwise they are still in the slot."""
    record: int | None = None
    """The host record written (offload) or read (prefetch)."""
    next_prefetch: int | None = None
    """Index of the step whose activations are fetched into this slot as soon as this step ends."""


@dataclass(frozen=True)
class SwapPlan:
    """All steps of one training step on one stage, in order."""

    steps: tuple[SwapStep, ...]
    num_slots: int
    num_records: int

    @cached_property
    def num_offloads(self) -> int:
        return sum(step.offload for step in self.steps)


def swap_plan(ops: Sequence[LayerOp], max_slots: int = 2) -> SwapPlan:
    """Plan one training step of one stage; two slots are MEMO's rounding buffers.

    A slot holds one operation's activations: those of a layer, or of one section of it.

    A single stage uses slot i mod 2 for layer i. Activations never move if their backward comes while they are still in
    their slot. `num_slots` is the number of slots needed, at most max_slots: one layer needs one. Without backwards
    nothing moves.
    """
    slots, evicted = _assign_slots(ops, max_slots)
    following = _next_users(slots)
    steps: list[SwapStep] = []
    records: dict[tuple[Any, ...], int] = {}
    # The record freed first is reused first: its prefetch was issued longest ago, and has most likely ended.
    free: deque[int] = deque()
    num_records = 0
    reads = [op.kind == "B" and op.key in evicted for op in ops]
    record_read: dict[int, int] = {}
    for index, op in enumerate(ops):
        offload = op.kind == "F" and op.key in evicted
        if offload:
            if not free:
                free.append(num_records)
                num_records += 1
            records[op.key] = free.popleft()
        record = records[op.key] if offload else record_read.get(index)
        user = following.get(index)
        if user is not None and reads[user]:
            record_read[user] = records.pop(ops[user].key)
            free.append(record_read[user])
        else:
            user = None
        steps.append(SwapStep(op, slots[index], offload, reads[index], record, user))
    return SwapPlan(tuple(steps), max(slots, default=-1) + 1, num_records)


class SweepPlans(NamedTuple):
    """The plans of what moves beside the slots of layers that are swept (memo.executor.sweep).

    Attributes:
        keys: keys and values, of the layers that have them: whole layers in one slot, each part of which is free after
            its section. Where their store slides, they move in sections.
        inputs: sections of the inputs of layers that recompute attention; None where no layer does.
        hidden: sections of the hidden states between layers; None where these stay on the device.
        evaluation: the sections of hidden states in an evaluation, in the slots and records of `hidden`.
    """

    keys: SwapPlan
    inputs: SwapPlan | None
    hidden: SwapPlan | None
    evaluation: SwapPlan | None


def sweep_plans(ops: SweptOps, hidden: HiddenOps | None = None) -> tuple[SwapPlan, SweepPlans]:
    """The plan of sections, and the plans of what moves beside them.

    `hidden`: None where hidden states stay on the device.
    """
    sections = swap_plan(ops.sections)
    inputs = swap_plan(ops.inputs) if ops.inputs else None
    moved = (None, None) if hidden is None else (swap_plan(hidden.training), swap_plan(hidden.evaluation))
    keys = swap_plan(ops.keys) if ops.keys_slide else swap_plan(ops.keys, max_slots=1)
    return sections, SweepPlans(keys, inputs, *moved)


def _assign_slots(ops: Sequence[LayerOp], max_slots: int) -> tuple[list[int], set[tuple[Any, ...]]]:
    """The slot of each operation, and the keys whose slot another operation takes before their backward."""
    awaited = {op.key for op in ops if op.kind == "B"}
    content: list[tuple[Any, ...] | None] = [None] * max_slots  # None unless a later backward needs it
    used = [-1] * max_slots  # index of the last user
    slots: list[int] = []
    evicted: set[tuple[Any, ...]] = set()
    for index, op in enumerate(ops):
        if op.kind == "B" and op.key in content:
            slot = content.index(op.key)
        else:
            slot = _choose_slot(op.kind, content, used)
            pushed_out = content[slot]
            if pushed_out is not None:
                evicted.add(pushed_out)
        content[slot] = op.key if op.kind == "F" and op.key in awaited else None
        used[slot] = index
        slots.append(slot)
    return slots, evicted


def _choose_slot(kind: Kind, content: list[tuple[Any, ...] | None], used: list[int]) -> int:
    """The slot for an operation.

    A forward takes a slot whose content is not needed any more: the one freed last, as it then waits for no copy. So a
    single stage keeps layer i in slot i mod 2. If every content is needed, it takes the least recently used slot, whose
    copies then overlap with the operations in the other slots. A backward also takes the least recently used slot,
    because its prefetch must begin before the operation that precedes it.
    """
    empty = [slot for slot, key in enumerate(content) if key is None]
    if kind == "F" and empty:
        return max(empty, key=lambda slot: (used[slot], -slot))
    return min(range(len(used)), key=lambda slot: used[slot])


def _next_users(slots: list[int]) -> dict[int, int]:
    """{index of a step: index of the next step in the same slot}."""
    last: dict[int, int] = {}
    following: dict[int, int] = {}
    for index, slot in enumerate(slots):
        if slot in last:
            following[last[slot]] = index
        last[slot] = index
    return following

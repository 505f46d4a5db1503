"""The engine that obeys a swap plan: it turns each step of the plan into waits, events and copies.

A slot is one flat buffer of bytes; of each layer one contiguous prefix moves, so an offload is one copy
slot[:moved_bytes] -> record, and a prefetch one copy back. Around layer operation t in slot s:

    begin:  compute waits until s is ready      (F: its last content is offloaded; B: its own has arrived)
    ...     the layer reads and writes s
    end:    offload stream:   wait for compute; wait until the record was read; copy s -> record
            prefetch stream:  wait for compute; wait until s and the record were offloaded; copy record -> s

The layer calls `begin` and `end` from wherever it runs (on CUDA, backwards run in autograd's thread), one
operation at a time; the order is asserted against the plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from memo.errors import PlanError
from memo.executor.streams import Event, Stream, StreamBackend
from memo.planner.swap import SwapPlan, SwapStep
from memo.planner.swap_validator import validate

_POISON = 0xFF
"""Bytes of a NaN in every floating dtype."""


@dataclass
class SwapStatistics:
    """Counts of copies since the swapper was created."""

    offloads: int = 0
    prefetches: int = 0
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0


class Records(Protocol):
    """Host memory in records of equal size; a HostPool is some."""

    @property
    def num_records(self) -> int: ...
    @property
    def record_bytes(self) -> int: ...
    def record(self, index: int) -> Tensor: ...


class Swapper:
    """Drives the slots of one stage through its plan, step after training step.

    Args:
        slots: plan.num_slots flat uint8 tensors on the device, each of at least moved_bytes.
        moved_bytes: length of the prefix of a slot that is moved, the same for every layer.
        pool: at least plan.num_records records of moved_bytes.
        poison: for tests: fill what is no longer valid with NaN, so that reading it shows in the results.
        name: begins the names of its buffers, for the checker of races, where a backend serves several swappers.

    Raises PlanError when the plan is wrong in itself or does not fit slots and pool.
    """

    def __init__(
        self,
        plan: SwapPlan,
        slots: Sequence[Tensor],
        moved_bytes: int,
        pool: Records,
        backend: StreamBackend,
        poison: bool = False,
        name: str = "",
    ) -> None:
        validate(plan)
        _check_fit(plan, slots, moved_bytes, pool)
        self.name = name
        self.plan, self.slots, self.moved_bytes, self.pool = plan, slots, moved_bytes, pool
        self.backend = backend
        self.statistics = SwapStatistics()
        self._position = 0  # index of the step that is running or comes next
        self._open = False  # between begin and end
        # For each slot the copy that its next user must wait for; for each record the last copy into or out of it.
        self._offloaded: list[Event | None] = [None] * plan.num_slots
        self._prefetched: list[Event | None] = [None] * plan.num_slots
        self._record_used: list[Event | None] = [None] * plan.num_records
        self._poison = torch.full((moved_bytes,), _POISON, dtype=torch.uint8) if poison else None
        if poison:
            for buffer in [*slots, *(pool.record(record) for record in range(plan.num_records))]:
                buffer.fill_(_POISON)

    @property
    def current(self) -> SwapStep:
        """The step that is running, or else the next one.

        In a backward with `.prefetch` only the moved prefix of the slot is valid; in one without it, the slot is as the
        forward left it.
        """
        if self._position == len(self.plan.steps):
            raise PlanError(
                f"all {self._position} steps of the swap plan are done: call reset() between training steps"
            )
        return self.plan.steps[self._position]

    def begin(self, kind: str, layer: int, section: int | None = None) -> int:
        """Before the layer, or a section of it, touches its slot; returns the index of the slot.

        Raises PlanError when the plan expects another operation.
        """
        step = self._expect(kind, layer, section, begin=True)
        slot, name = step.slot, self._slot_name(step.slot)
        if kind == "F":
            self.backend.wait(Stream.COMPUTE, self._offloaded[slot])  # the offload reads it
            self._offloaded[slot] = None
        elif step.prefetch:
            self.backend.wait(Stream.COMPUTE, self._prefetched[slot])
        self.backend.access(Stream.COMPUTE, name, "w" if kind == "F" else "r", str(step.op))
        if self._poison is not None and (kind == "F" or step.prefetch):
            self.slots[slot][0 if kind == "F" else self.moved_bytes :].fill_(_POISON)
        self._open = True
        return slot

    def end(self, kind: str, layer: int, section: int | None = None) -> None:
        """After the last access to the slot: issues the offload and the prefetch that follow."""
        step = self._expect(kind, layer, section, begin=False)
        # Backwards write as well: they recompute what was not moved.
        self.backend.access(Stream.COMPUTE, self._slot_name(step.slot), "w", str(step.op))
        if self._poison is not None and kind == "B":
            self.slots[step.slot].fill_(_POISON)
        if step.offload or step.next_prefetch is not None:
            computed = self.backend.record(Stream.COMPUTE)
            if step.offload:
                self._offload(step, computed)
            if step.next_prefetch is not None:
                self._prefetch(self.plan.steps[step.next_prefetch], computed)
        self._position += 1
        self._open = False

    def next_step(self) -> None:
        """Between training steps. Raises PlanError when the last one did not follow the plan to its end."""
        if self._open or self._position != len(self.plan.steps):
            raise PlanError(
                f"the training step ended after {self._position} of {len(self.plan.steps)} layer operations of"
                " the swap plan: run all of them, or call reset() to drop the step"
            )
        self.reset()

    def reset(self) -> None:
        """Return to the beginning of the plan, from wherever the step stopped.

        The copies of an interrupted step are finished first; after a complete step the host waits for nothing. Raises
        the error of a copy that failed (in ThreadStreams); the swapper is reset even then.
        """
        interrupted = self._open or 0 < self._position < len(self.plan.steps)
        self._position, self._open = 0, False
        if interrupted:
            self._offloaded = [None] * self.plan.num_slots
            self._prefetched = [None] * self.plan.num_slots
            self._record_used = [None] * self.plan.num_records
            self.backend.synchronize()

    def _offload(self, step: SwapStep, computed: Event) -> None:
        assert step.record is not None
        backend = self.backend
        backend.wait(Stream.OFFLOAD, computed)
        backend.wait(Stream.OFFLOAD, self._record_used[step.record])  # a prefetch may still read it
        self._copy(Stream.OFFLOAD, step)
        done = backend.record(Stream.OFFLOAD)
        self._offloaded[step.slot] = self._record_used[step.record] = done
        self.statistics.offloads += 1
        self.statistics.offloaded_bytes += self.moved_bytes

    def _prefetch(self, target: SwapStep, computed: Event) -> None:
        assert target.record is not None
        backend, record = self.backend, target.record
        backend.wait(Stream.PREFETCH, computed)
        backend.wait(Stream.PREFETCH, self._offloaded[target.slot])  # the slot may still be offloaded
        backend.wait(Stream.PREFETCH, self._record_used[record])  # it may still be written
        self._copy(Stream.PREFETCH, target)
        if self._poison is not None:
            backend.copy(Stream.PREFETCH, self.pool.record(record), self._poison, self._record_name(record), "poison")
        done = backend.record(Stream.PREFETCH)
        self._offloaded[target.slot] = None  # whoever waits for the prefetch need not wait for the offload
        self._prefetched[target.slot] = self._record_used[record] = done
        self.statistics.prefetches += 1
        self.statistics.prefetched_bytes += self.moved_bytes

    def _copy(self, stream: Stream, step: SwapStep) -> None:
        assert step.record is not None
        device = self.slots[step.slot][: self.moved_bytes], self._slot_name(step.slot)
        host = self.pool.record(step.record), self._record_name(step.record)
        (dst, dst_name), (src, src_name) = (host, device) if stream is Stream.OFFLOAD else (device, host)
        self.backend.copy(stream, dst, src, dst_name, src_name)

    def _expect(self, kind: str, layer: int, section: int | None, begin: bool) -> SwapStep:
        step = self.current
        if (kind, layer, section) != (step.op.kind, step.op.layer, step.op.section) or self._open is begin:
            state = "is still open" if self._open else "comes next"
            of_layer = f"{kind} layer {layer}" if section is None else f"{kind} layer {layer} section {section}"
            raise PlanError(
                f"{'begin' if begin else 'end'} of {of_layer}, but in the swap plan {step.op} (step"
                f" {self._position} of {len(self.plan.steps)}) {state}: plan for the schedule that runs, or reset()"
                " after an interrupted step"
            )
        return step

    def _slot_name(self, slot: int) -> str:
        return f"{self.name}slot{slot}"

    def _record_name(self, record: int) -> str:
        return f"{self.name}record{record}"


def _check_fit(plan: SwapPlan, slots: Sequence[Tensor], moved_bytes: int, pool: Records) -> None:
    if len(slots) != plan.num_slots:
        raise PlanError(f"the swap plan uses {plan.num_slots} slots, but {len(slots)} are given")
    for index, slot in enumerate(slots):
        if slot.dtype != torch.uint8 or slot.dim() != 1 or slot.numel() < moved_bytes:
            raise PlanError(
                f"slot {index} is {slot.dtype} {list(slot.shape)}: it must be flat uint8 with at least"
                f" moved_bytes = {moved_bytes} bytes"
            )
    if plan.num_records and (pool.num_records < plan.num_records or pool.record_bytes != moved_bytes):
        raise PlanError(
            f"the swap plan needs {plan.num_records} host records of {moved_bytes} bytes, but the pool has"
            f" {pool.num_records} of {pool.record_bytes}"
        )

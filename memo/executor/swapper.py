"""The engine that obeys a swap plan: it turns each step of the plan into waits, events and copies.

A slot is one flat buffer of bytes, of which only a prefix moves: an offload is one copy slot[:moved_bytes] -> record,
and a prefetch is one copy back. Around layer operation t in slot s:

    begin:  compute waits until s is ready      (F: the old content is offloaded; B: the layer's record has arrived)
    ...     the layer reads and writes s
    end:    offload stream:   wait for compute; wait until the record was read; copy s -> record
            prefetch stream:  wait for compute; wait until s and the record were offloaded; copy record -> s

A record on disk is copied through a staging buffer (memo.executor.staging). Its prefetch is issued once the record has
been read from disk, at the latest in the `begin` that needs it.

If a layer still reads its slot long after its last write, `end_writes` issues the offload right after that write.

The layer calls `begin` and `end` in the thread in which it runs (on CUDA, backwards run in autograd's thread), one
operation at a time; the order is checked against the plan.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from memo.errors import PlanError
from memo.executor.host_records import HostRecords
from memo.executor.recorder import BeginSpan, SwapRecorder, timed
from memo.executor.streams import AccessMode, Event, Stream, StreamBackend, Timestamp
from memo.planner.swap import SwapPlan, SwapStep
from memo.planner.swap_validator import validate


class Swapper:
    """Drives the slots of one stage through its plan, step after training step.

    Args:
        slots: plan.num_slots flat uint8 tensors on the device, each of at least moved_bytes.
        moved_bytes: length of the prefix of a slot that is moved, the same for every layer.
        records: the host records of the plan, in parts of moved_bytes.
        name: prefix of its buffers' names for the race checker, if a backend serves several swappers.
        part: the part of each record that the slots hold; None: records are not divided.

    Raises PlanError if the plan is invalid or does not fit slots and records.

    Attributes:
        listeners: called at operations, copies and waits.
    """

    def __init__(
        self,
        plan: SwapPlan,
        slots: Sequence[Tensor],
        moved_bytes: int,
        records: HostRecords,
        backend: StreamBackend,
        name: str = "",
        part: int | None = None,
    ) -> None:
        validate(plan)
        _check_fit(plan, slots, moved_bytes, records)
        self.plan, self.slots, self.moved_bytes, self.records = plan, slots, moved_bytes, records
        self.backend, self.name = backend, name
        self.listeners: list[BeginSpan] = []
        self._staging, self._part = records.staging, part
        self._position = 0  # index of the step that is running or comes next
        self._open = False  # between begin and end
        self._has_offloaded = False  # whether the running step has issued its offload
        # The copies that the next user of each slot must wait for, and the last copy into or out of each record.
        self._offloaded: list[Event | None] = [None] * plan.num_slots
        self._prefetched: list[Event | None] = [None] * plan.num_slots
        self._record_used: list[Event | None] = [None] * plan.num_records
        self._end_compute: list[Callable[[], None]] = []  # what listeners returned for the running step
        for buffer in [*slots, *records.buffers(part or 0)]:
            backend.spoil(Stream.COMPUTE, buffer, "new memory")

    @contextlib.contextmanager
    def recorded(self, origin: Timestamp | None = None) -> Iterator[SwapRecorder]:
        """Record operations and copies, but no disk transfers, until the end of the block.

        The block must begin between two training steps.
        Times count from `origin`, a timestamp of the backend; default: the beginning of the block.
        """
        recorder = SwapRecorder(self.backend, origin)
        begin = partial(recorder.begin, "activations")
        self.listeners.append(begin)
        try:
            yield recorder
        finally:
            self.listeners.remove(begin)

    @property
    def current(self) -> SwapStep:
        """The running step, or the next one between two steps.

        In a backward with `.prefetch`, only the moved prefix of the slot is valid. In a backward without it, the slot
        is as the forward left it.
        """
        if self._position == len(self.plan.steps):
            raise PlanError(
                f"all {self._position} steps of the swap plan are done: call reset() between training steps"
            )
        return self.plan.steps[self._position]

    def begin(self, kind: str, layer: int, section: int | None = None) -> int:
        """Call before a layer, or a section of it, touches its slot; returns the slot's index.

        Raises PlanError if the plan expects a different operation.
        """
        step = self._expect(kind, layer, section, begin=True)
        self.prefetch_what_is_read()
        if self._staging is not None:
            self._staging.issue_until(self._turn(self._position))
        slot, name = step.slot, self._slot_name(step.slot)
        if kind == "F":
            self._await(step, self._offloaded[slot])  # the offload reads it
            self._offloaded[slot] = None
        elif step.prefetch:
            self._await(step, self._prefetched[slot])
        self.backend.access(Stream.COMPUTE, name, "w" if kind == "F" else "r", str(step.op))
        if kind == "F" or step.prefetch:
            self.backend.spoil(Stream.COMPUTE, self.slots[slot][0 if kind == "F" else self.moved_bytes :], name)
        self._open = True
        self._end_compute = [begin("compute", step, self._part, 0) for begin in self.listeners]
        return slot

    def end_writes(self, kind: str, layer: int) -> None:
        """Issue the offload after the last write to the slot, which is still read until `end`."""
        step = self._expect(kind, layer, None, begin=False)
        self.backend.access(Stream.COMPUTE, self._slot_name(step.slot), "w", str(step.op))
        if step.offload:
            self._offload(step, self.backend.record(Stream.COMPUTE))
            self._has_offloaded = True

    def end(self, kind: str, layer: int, section: int | None = None) -> None:
        """Call after the last access to the slot: issues the offload, unless `end_writes` did, and the prefetch."""
        step = self._expect(kind, layer, section, begin=False)
        # Backwards write as well: they recompute what was not moved.
        mode: AccessMode = "r" if self._has_offloaded else "w"
        self.backend.access(Stream.COMPUTE, self._slot_name(step.slot), mode, str(step.op))
        for end in self._end_compute:
            end()
        if kind == "B":
            self.backend.spoil(Stream.COMPUTE, self.slots[step.slot], self._slot_name(step.slot))
        offloads = step.offload and not self._has_offloaded
        if offloads or step.next_prefetch is not None:
            computed = self.backend.record(Stream.COMPUTE)
            if offloads:
                self._offload(step, computed)
            if step.next_prefetch is not None:
                self._prefetch_when_read(step.next_prefetch, computed)
        self._position += 1
        self._open = self._has_offloaded = False
        self.prefetch_what_is_read()

    def prefetch_what_is_read(self) -> None:
        """Issue the due prefetches whose records have been read from disk; never waits. `begin` and `end` call it."""
        if self._staging is not None:
            self._staging.issue_read()

    def next_step(self) -> None:
        """Call between training steps. Raises PlanError if the last one did not follow the plan to its end."""
        if self._open or self._position != len(self.plan.steps):
            raise PlanError(
                f"the training step ended after {self._position} of {len(self.plan.steps)} layer operations of"
                " the swap plan: run all of them, or call reset() to drop the step"
            )
        self.reset()

    def reset(self) -> None:
        """Return to the beginning of the plan, wherever the step stopped.

        After an interrupted step the host waits for the step's copies; after a complete step it waits for nothing.
        Raises the error of a copy that failed (in ThreadStreams); the swapper is reset even then.
        """
        interrupted = self._open or 0 < self._position < len(self.plan.steps)
        self._position, self._open, self._has_offloaded = 0, False, False
        if self._staging is not None:
            self._staging.next_step()
        if interrupted:
            self._offloaded = [None] * self.plan.num_slots
            self._prefetched = [None] * self.plan.num_slots
            self._record_used = [None] * self.plan.num_records
            if self._staging is not None:
                self._staging.reset()
            self.backend.synchronize()

    def _offload(self, step: SwapStep, computed: Event) -> None:
        """Issue the offload of the running step, to begin after the event `computed`."""
        assert step.record is not None
        backend, index = self.backend, self._position
        staging, turn = self._staging, self._turn(index)
        backend.wait(Stream.OFFLOAD, computed)
        if staging is not None and turn is not None:
            staging.before_offload(turn)
        else:
            backend.wait(Stream.OFFLOAD, self._record_used[step.record])  # a prefetch may still read it
        self._copy(Stream.OFFLOAD, index)
        done = backend.record(Stream.OFFLOAD)
        self._offloaded[step.slot] = done
        if staging is not None and turn is not None:
            staging.after_offload(turn, done)
        else:
            self._record_used[step.record] = done

    def _prefetch_when_read(self, index: int, computed: Event) -> None:
        """Issue the prefetch for step `index`: now if its record is in memory, else when it has been read from disk."""
        turn = self._turn(index)
        if self._staging is None or turn is None:
            self._prefetch(index, computed)
        else:
            self._staging.await_read(turn, partial(self._prefetch, index, computed))

    def _prefetch(self, index: int, computed: Event) -> None:
        """Issue the prefetch for step `index`; if its record is on disk, its read has begun."""
        target = self.plan.steps[index]
        assert target.record is not None
        backend, record = self.backend, target.record
        staging, turn = self._staging, self._turn(index)
        backend.wait(Stream.PREFETCH, computed)
        backend.wait(Stream.PREFETCH, self._offloaded[target.slot])  # the slot may still be offloaded
        if staging is not None and turn is not None:
            staging.before_prefetch(turn)
        else:
            backend.wait(Stream.PREFETCH, self._record_used[record])  # it may still be written
        self._copy(Stream.PREFETCH, index)
        backend.spoil(Stream.PREFETCH, *self._host(index))
        done = backend.record(Stream.PREFETCH)
        self._offloaded[target.slot] = None  # a wait for the prefetch includes the offload
        self._prefetched[target.slot] = done
        if staging is not None and turn is not None:
            staging.after_prefetch(turn, done)
        else:
            self._record_used[record] = done

    def _turn(self, index: int) -> int | None:
        """The turn in which a step's activations use a staging buffer; None if their record is in memory."""
        return None if self._staging is None else self._staging.turn(index, self._part or 0)

    def _await(self, step: SwapStep, event: Event | None) -> None:
        """Make compute wait for a copy before the step; None: there is nothing to wait for."""
        if event is not None:
            with timed(self.listeners, "wait", step, self._part):
                self.backend.wait(Stream.COMPUTE, event)

    def _copy(self, stream: Stream, index: int) -> None:
        step = self.plan.steps[index]
        device = self.slots[step.slot][: self.moved_bytes], self._slot_name(step.slot)
        host, offloads = self._host(index), stream is Stream.OFFLOAD
        (dst, dst_name), (src, src_name) = (host, device) if offloads else (device, host)
        with timed(self.listeners, "offload" if offloads else "prefetch", step, self._part, self.moved_bytes):
            self.backend.copy(stream, dst, src, dst_name, src_name)

    def _host(self, index: int) -> tuple[Tensor, str]:
        """The host memory that a step's copies use, a record or a staging buffer; and its name."""
        record = self.plan.steps[index].record
        assert record is not None
        turn = self._turn(index)
        if self._staging is not None and turn is not None:
            buffer, name = self._staging.buffer(turn)
            return buffer[: self.moved_bytes], name
        return self.records.record(record, self._part or 0), f"{self.name}record{record}"

    def _expect(self, kind: str, layer: int, section: int | None, begin: bool) -> SwapStep:
        step = self.current
        if (kind, layer, section) != (step.op.kind, step.op.layer, step.op.section) or self._open is begin:
            state = "is still open" if self._open else "comes next"
            layer_name = f"{kind} layer {layer}" if section is None else f"{kind} layer {layer} section {section}"
            raise PlanError(
                f"{'begin' if begin else 'end'} of {layer_name}, but in the swap plan {step.op} (step"
                f" {self._position} of {len(self.plan.steps)}) {state}: plan for the schedule that runs, or reset()"
                " after an interrupted step"
            )
        return step

    def _slot_name(self, slot: int) -> str:
        return f"{self.name}slot{slot}"


def _check_fit(plan: SwapPlan, slots: Sequence[Tensor], moved_bytes: int, records: HostRecords) -> None:
    if len(slots) != plan.num_slots:
        raise PlanError(f"the swap plan uses {plan.num_slots} slots, but {len(slots)} are given")
    for index, slot in enumerate(slots):
        if slot.dtype != torch.uint8 or slot.dim() != 1 or slot.numel() < moved_bytes:
            raise PlanError(
                f"slot {index} is {slot.dtype} {list(slot.shape)}: it must be flat uint8 with at least"
                f" moved_bytes = {moved_bytes} bytes"
            )
    if plan.num_records and (records.num_records < plan.num_records or records.part_bytes != moved_bytes):
        raise PlanError(
            f"the swap plan needs {plan.num_records} host records of {moved_bytes} bytes, but there are"
            f" {records.num_records} of {records.part_bytes}"
        )

"""The part of the streaming of states that concerns gradients: their slots, their reduction, and the copy of the
result.

Between microbatches the sum of a gradient may go to host memory and come back. After the last microbatch this rank's
shard of it goes to the memory that holds the masters. memo.executor.states has the rest: weights, and the order of all.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import Work

from memo.errors import PlanError
from memo.executor.state_buffers import StateBuffers, StateSlot
from memo.executor.streams import Event, Stream, StreamBackend
from memo.parallel.collectives import group_size, reduce_scatter_async
from memo.parallel.data import ShardedDataParallel
from memo.parallel.units import Bucket, Unit
from memo.planner.state_plan import StatePlan, StateStep

Update = Callable[[Unit, Callable[[], None]], Future[None]]
"""Starts the update of a layer whose gradient is on its way to host memory (memo.train.optimizer), and returns what
has a result when the gradient has been used. The second argument blocks until the gradient has arrived."""


@dataclass
class _Reduction:
    """The reduction of one layer's gradient, which starts when its backward ends."""

    unit: Unit
    step: StateStep
    parts: list[Tensor]
    works: list[Work]
    source: StateSlot | None  # the slot of the gradient, free when the reduction has ended
    reduced: StateSlot | None  # the stage that receives the shard; None: the shard is in its source


class GradientStreamer:
    """The base of `StateStreamer`: slots of gradients, their reductions, and copies of the results."""

    def __init__(
        self,
        plan: StatePlan,
        units: Mapping[int, Unit],
        data_parallel: ShardedDataParallel,
        backend: StreamBackend,
        poison: bool,
    ) -> None:
        self.plan, self.data_parallel, self.backend, self._poison = plan, data_parallel, backend, poison
        self._units = units
        self._num_shards = group_size(data_parallel.group)
        self._buffers = StateBuffers(plan, units, data_parallel, poison)
        made = backend.record(Stream.COMPUTE)  # follows all earlier uses of this memory
        for slot in self._buffers.slots:
            slot.free = made
        self._written: Event = None  # follows the CPU's last write to host memory
        self._pending: _Reduction | None = None
        self._next_reduced = 0
        self._offloaded: dict[str, Event] = {}
        self._update: Update | None = None
        self._updates: dict[int, Future[None]] = {}  # by record of the ring: of the layer whose gradient is in it

    def _lend_gradient(self, unit: Unit, slot: StateSlot, step: StateStep) -> None:
        if step.start == "zero":
            self.backend.wait(Stream.COMPUTE, slot.free)
            slot.flat.zero_()
        elif step.start == "fetched":
            self.backend.wait(Stream.COMPUTE, slot.filled)
        self.backend.access(Stream.COMPUTE, slot.name, "w", str(step.op))
        self.data_parallel.bind_gradients(unit, unit.parts(slot.flat))

    def _offload_partial(self, unit: Unit, slot: StateSlot) -> None:
        """Copy the sum of the microbatches so far, not yet reduced, to host memory."""
        self._follow(Stream.OFFLOAD, Stream.COMPUTE)
        for bucket, part in zip(unit.buckets, unit.parts(slot.flat), strict=True):
            name = partial_name(bucket)
            self.backend.copy(Stream.OFFLOAD, given(bucket.partial), part, name, slot.name)
            self._offloaded[name] = self.backend.record(Stream.OFFLOAD)
        slot.free = self.backend.record(Stream.OFFLOAD)

    def _fetch_partial(self, unit: Unit, slot: StateSlot) -> None:
        self.backend.wait(Stream.PREFETCH, slot.free)
        self._spoil(slot)
        for bucket, part in zip(unit.buckets, unit.parts(slot.flat), strict=True):
            name = partial_name(bucket)
            self.backend.wait(Stream.PREFETCH, self._offloaded[name])
            self.backend.copy(Stream.PREFETCH, part, given(bucket.partial), slot.name, name)
        # The record is written next after this unit's backward, which waits for the slot. Every offload waits for
        # compute, so the offload stream need not wait for this fetch; a wait here would delay other offloads.
        slot.filled = self.backend.record(Stream.PREFETCH)

    def _start_reduction(self, unit: Unit, step: StateStep, slot: StateSlot | None) -> None:
        wholes = [given(b.gradients) for b in unit.buckets] if slot is None else unit.parts(slot.flat)
        if self._num_shards == 1:
            self._pending = _Reduction(unit, step, wholes, [], slot, None)
            return
        reduced = self._buffers.reduced[self._next_reduced % len(self._buffers.reduced)]
        self._next_reduced += 1
        self.backend.wait(Stream.COMPUTE, reduced.free)
        self.backend.access(Stream.COMPUTE, reduced.name, "w", f"reduction of {step.op}")
        parts, works = unit.shard_parts(reduced.flat), []
        for whole, part in zip(wholes, parts, strict=True):
            _, work = reduce_scatter_async(whole, self.data_parallel.group, out=part)
            works += [] if work is None else [work]
        self._pending = _Reduction(unit, step, parts, works, slot, reduced)

    def _settle_slots(self, step: StateStep) -> None:
        """Before an operation: finish the pending reduction if another layer now takes its slot.

        Also finish a reduction without messages, on a single rank, because it has nothing that the operation could
        hide.
        """
        if self._pending is None:
            return
        taken = [fetch.slot for fetch in step.fetches if fetch.kind == "gradient"]
        taken += [] if step.gradient_slot is None else [step.gradient_slot]
        if not self._pending.works or any(self._pending.source is self._buffers.gradients[slot] for slot in taken):
            self.finish_gradients()

    def finish_gradients(self) -> None:
        """Wait for the pending reduction, if there is one, and copy its shard to the memory that holds the masters."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        for work in pending.works:
            work.wait()
        record = pending.unit.ring_record
        if record is not None:
            self._clear_record(record)
        for bucket, part in zip(pending.unit.buckets, pending.parts, strict=True):
            self._deliver(bucket, part, pending)
        on_host = pending.unit.places.optimizer_on_host
        gone = self.backend.record(Stream.OFFLOAD if on_host else Stream.COMPUTE)
        if pending.reduced is not None:
            pending.reduced.free = gone
            gone = self.backend.record(Stream.COMPUTE)
        if pending.source is not None:
            pending.source.free = gone
        if on_host and pending.step.is_last and self._update is not None:
            done = self._start_update(pending.unit, self._update)
            if record is not None:
                self._updates[record] = done

    def _clear_record(self, record: int) -> None:
        """Wait until the layer whose gradient is in this record of the ring has been updated."""
        if self._update is None:
            raise PlanError("gradients that are consumed as they arrive need train_step(), which says with which rate")
        if record in self._updates:
            self._updates[record].result()
            self._written = self.backend.record(Stream.HOST)

    def _start_update(self, unit: Unit, update: Update) -> Future[None]:
        event = self.backend.record(Stream.OFFLOAD)

        def wait() -> None:
            self.backend.wait(Stream.HOST, event)
            for bucket in unit.buckets:
                self.backend.access(Stream.HOST, gradient_name(bucket), "r", "update")

        return update(unit, wait)

    def _deliver(self, bucket: Bucket, shard: Tensor, pending: _Reduction) -> None:
        """Add the reduced gradient of earlier microbatches, complete the sum after the last one, and store it."""
        step, data_parallel = pending.step, self.data_parallel
        if not bucket.places.optimizer_on_host:
            if step.is_first:
                bucket.gradient_shard.copy_(shard)
            else:
                bucket.gradient_shard.add_(shard)
            if step.is_last:
                data_parallel.complete([(bucket, bucket.gradient_shard)])
            return
        if step.adds_up:
            shard = self._summed(bucket, shard)
        if step.is_last:
            data_parallel.complete([(bucket, shard)])
        holder = pending.reduced or pending.source
        self._offload(bucket, shard, holder.name if holder is not None else name_of("gradient", bucket))

    def _summed(self, bucket: Bucket, shard: Tensor) -> Tensor:
        """Fetch the sum of earlier microbatches from host memory, and add it to this shard on the device."""
        (stage,) = self._buffers.sum
        part = stage.flat[: shard.numel()]
        self.backend.wait(Stream.PREFETCH, stage.free)
        self.backend.wait(Stream.PREFETCH, self._offloaded[gradient_name(bucket)])
        self.backend.copy(Stream.PREFETCH, part, bucket.gradient_shard, stage.name, gradient_name(bucket))
        self._follow(Stream.COMPUTE, Stream.PREFETCH)
        self._follow(Stream.OFFLOAD, Stream.PREFETCH)
        self.backend.access(Stream.COMPUTE, stage.name, "r", "sum of gradients")
        shard.add_(part)
        stage.free = self.backend.record(Stream.COMPUTE)
        return shard

    def offload_gradient(self, bucket: Bucket, reduced: Tensor) -> None:
        self._offload(bucket, reduced, name_of("gradient", bucket))

    def _offload(self, bucket: Bucket, reduced: Tensor, name: str) -> None:
        self._follow(Stream.OFFLOAD, Stream.COMPUTE)
        self.backend.wait(Stream.OFFLOAD, self._written)
        self.backend.copy(Stream.OFFLOAD, bucket.gradient_shard, reduced, gradient_name(bucket), name)
        self._offloaded[gradient_name(bucket)] = self.backend.record(Stream.OFFLOAD)

    def _spoil(self, slot: StateSlot) -> None:
        """For tests: fill a slot with NaN, so that reading its old content shows in the results."""
        if not self._poison:
            return
        for flat, name in ((slot.flat, slot.name), (slot.shard, f"{slot.name} shard")):
            if flat is not None:
                self.backend.copy(Stream.PREFETCH, flat, torch.full_like(flat, float("nan")), name, "poison")

    def _follow(self, stream: Stream, other: Stream) -> None:
        """Make `stream` wait for everything issued on `other` so far."""
        self.backend.wait(stream, self.backend.record(other))


def given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the placement gives this bucket no such memory"
    return tensor


def name_of(kind: str, bucket: Bucket) -> str:
    """The name of a bucket's memory for the race checker."""
    return f"{kind} of {bucket.plan.slots[0].name}"


def source_name(bucket: Bucket) -> str:
    return name_of("masters" if bucket.source is bucket.master else "host weights", bucket)


def gradient_name(bucket: Bucket) -> str:
    """The name of a reduced gradient's record in host memory, which layers may have in turn."""
    return name_of("host gradient", bucket) if bucket.ring_record is None else f"gradient record {bucket.ring_record}"


def partial_name(bucket: Bucket) -> str:
    one_record = bucket.partial is bucket.gradient_shard
    return gradient_name(bucket) if one_record else name_of("host sum", bucket)

"""The states of one layer that are not resident, or whose masters are in host memory: their copies and reductions.

    stream      what it does for a layer
    PREFETCH    copies this rank's shard of weights and the sum of a gradient to the device; gathers weights
    COMPUTE     runs the layer, and completes its reduced gradient
    OFFLOAD     copies gradients to host memory
    HOST        updates the masters there (memo.train.optimizer)

Each copy waits for the last use of what it overwrites, and each use for the copy. `memo.executor.states` calls these
methods in the order of the plan; an order that the phases do not allow raises PlanError.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

from torch import Tensor
from torch.distributed import Work

from memo.errors import PlanError
from memo.executor.state_buffers import StateBuffers, given, gradient_name, in_turn, name_of, partial_name, source_name
from memo.executor.state_slots import Phase, SlotUser, StateSlot
from memo.executor.streams import Event, Stream, StreamBackend
from memo.parallel.collectives import all_gather_async, reduce_scatter_async
from memo.parallel.units import Unit, parts_of
from memo.planner.state_plan import StateStep

Update = Callable[[Unit, Callable[[], None]], Future[None]]
"""Starts the update of a layer whose gradient is being copied to host memory (memo.train.optimizer). The future that it
returns has a result once the gradient has been used. The second argument blocks until the gradient has arrived."""


@dataclass(frozen=True)
class Reduction:
    """The reduction of one gradient, which starts when its backward ends.

    Attributes:
        gradient: the gradient that is reduced; its slot is free when the reduction has ended.
        parts: by bucket, this rank's shard of the result; valid when `works` have ended.
        stage: the staging buffer that holds the parts; None: they are where the gradient is.
        sums: by bucket, the sum of earlier microbatches, which is being fetched; none if there is nothing to add to.
    """

    step: StateStep
    gradient: SlotUser
    parts: list[Tensor]
    works: list[Work]
    stage: StateSlot | None
    sums: list[Tensor]


class LayerStates:
    """Moves the states of one layer, and knows which of them are on the device and in which slots.

    Attributes:
        weights, gradient: phase and slot of each; the gradient belongs to the running or the next backward.
        reduction: the reduction of the last backward's gradient, until `finish_reduction`.
    """

    def __init__(self, layer: int, unit: Unit, buffers: StateBuffers) -> None:
        self.layer, self.unit, self._buffers = layer, unit, buffers
        # Events after the last offload of each bucket's gradient.
        self._offloaded: list[Event] = [None] * len(unit.trained_buckets)
        self._update: Future[None] | None = None
        self.is_updated = self.is_up_to_date = False
        self._reset()

    def _reset(self) -> None:
        self.weights = SlotUser(f"the weights of layer {self.layer}", not self.unit.places.weights_in_slot)
        self.gradient = self._new_gradient()
        self.reduction: Reduction | None = None

    def _new_gradient(self) -> SlotUser:
        return SlotUser(f"the gradient of layer {self.layer}", not self.unit.places.gradients_in_slot)

    @property
    def _backend(self) -> StreamBackend:
        return self._buffers.backend

    def begin_step(self) -> None:
        """Reset all phases, also after an exception; parameters in slots show NaN."""
        self._reset()
        self.is_up_to_date = False
        self._unbind_weights()
        self._unbind_gradient()

    def touch(self, kind: str, what: str) -> None:
        """Declare which resident weights and gradients an operation reads and writes."""
        for bucket in self.unit.buckets:
            self._buffers.touch_weights(bucket, what)
            if kind == "B" and not bucket.plan.frozen:
                self._buffers.touch_gradient(bucket, what)

    # The update of the masters.

    def begin_update(self, update: Future[None]) -> None:
        """Take note that a thread updates the masters; the next use of the layer waits for it."""
        self._update, self.is_updated, self.is_up_to_date = update, True, False

    def await_update(self) -> None:
        """Block the host until the update of the masters has ended; raises the error of one that failed."""
        if self._update is not None:
            update, self._update = self._update, None
            update.result()

    # Weights.

    def fetch_weights(self, slot: StateSlot) -> None:
        """Copy the weights into a slot, and gather them over dp x cp; the slot's holder must not be in use.

        Raises PlanError if it is.
        """
        backend, call = self._backend, f"fetch of the weights of layer {self.layer}"
        self.await_update()
        if slot.holder is not None:
            slot.holder.leave(call)
        for unused in slot.works:  # gathers of a layer that was fetched but did not run
            unused.wait()
        backend.wait(Stream.PREFETCH, slot.free)
        backend.wait(Stream.PREFETCH, self._buffers.written)
        self._buffers.spoil(slot)
        shards = self._bring_shards(slot)
        slot.works = []
        if self._buffers.num_shards > 1:
            wholes = parts_of(self.unit.buckets, slot.flat)
            with backend.issuing(Stream.PREFETCH):
                for bucket, shard, whole in zip(self.unit.buckets, shards, wholes, strict=True):
                    if not bucket.places.optimizer_on_host:
                        backend.access(Stream.PREFETCH, name_of("shard", bucket), "r", f"gather of layer {self.layer}")
                    _, gather = all_gather_async(shard, self._buffers.data_parallel.group, out=whole)
                    slot.works += [] if gather is None else [gather]
            backend.access(Stream.PREFETCH, slot.name, "w", f"gather of layer {self.layer}")
        slot.filled = backend.record(Stream.PREFETCH)
        self.weights.arrive(slot, call)  # last, because a fetch that fails leaves nothing valid

    def _bring_shards(self, slot: StateSlot) -> list[Tensor]:
        """Copy this rank's shard of each bucket to the device, into the slot itself if there is only one shard."""
        if not self.unit.places.optimizer_on_host:
            return [given(bucket.source) for bucket in self.unit.buckets]
        flat, name = (slot.flat, slot.name) if slot.shard is None else (slot.shard, f"{slot.name} shard")
        shards = parts_of(self.unit.buckets, flat, shards=True)
        for bucket, shard in zip(self.unit.buckets, shards, strict=True):
            source, place = given(bucket.source), source_name(bucket)
            if source.dtype != shard.dtype:
                (cast,) = self._buffers.cast
                wide = cast.flat[: source.numel()]
                self._backend.copy(Stream.PREFETCH, wide, source, cast.name, place)
                source, place = wide, cast.name
            self._backend.copy(Stream.PREFETCH, shard, source, name, place)
        return shards

    def lend_weights(self, what: str) -> None:
        """Before an operation: make the parameters views of the slot, if they are in one."""
        self.weights.enter(Phase.IN_USE, what)
        slot = self.weights.slot
        if slot is None:
            return
        self._backend.wait(Stream.COMPUTE, slot.filled)
        for work in slot.works:
            work.wait()
        slot.works = []
        self._backend.access(Stream.COMPUTE, slot.name, "r", what)
        self._buffers.data_parallel.bind_weights(self.unit, parts_of(self.unit.buckets, slot.flat))

    def return_weights(self, what: str) -> None:
        """After an operation: let other layers take the slot."""
        self.weights.enter(Phase.KEPT, what)
        if self.weights.slot is not None:
            self.weights.slot.free = self._backend.record(Stream.COMPUTE)
        self._unbind_weights()

    def _unbind_weights(self) -> None:
        if self.unit.places.weights_in_slot:
            self._buffers.data_parallel.bind_weights(self.unit, None)

    # The gradient, until its reduction.

    def fetch_gradient(self, slot: StateSlot) -> None:
        """Copy the sum of earlier microbatches from host memory into a slot."""
        backend = self._backend
        self.gradient.arrive(slot, f"fetch of the gradient of layer {self.layer}")
        backend.wait(Stream.PREFETCH, slot.free)
        self._buffers.spoil(slot)
        parts = self._gradient_parts(slot)
        for bucket, part, away in zip(self.unit.trained_buckets, parts, self._offloaded, strict=True):
            backend.wait(Stream.PREFETCH, away)
            backend.copy(Stream.PREFETCH, part, given(bucket.partial), slot.name, partial_name(bucket))
        # The record is next written after this unit's backward, which waits for the slot. Every offload waits for
        # compute, so the offload stream need not wait for this fetch; that wait would delay other offloads.
        slot.filled = backend.record(Stream.PREFETCH)

    def lend_gradient(self, step: StateStep, slot: StateSlot | None) -> None:
        """Before a backward: give the parameters main gradients. `slot` holds them if they begin with zeros."""
        gradient, what = self.gradient, str(step.op)
        if gradient.phase is Phase.ARRIVING and gradient.slot is not None:
            self._backend.wait(Stream.COMPUTE, gradient.slot.filled)
        if step.start == "zero" and slot is not None:
            gradient.arrive(slot, what)
            self._backend.wait(Stream.COMPUTE, slot.free)
            slot.flat.zero_()
        gradient.enter(Phase.IN_USE, what)
        if gradient.slot is None:
            return
        slot = gradient.slot
        self._backend.access(Stream.COMPUTE, slot.name, "w", what)
        self._buffers.data_parallel.bind_gradients(self.unit, self._gradient_parts(slot))

    def return_gradient(self, step: StateStep) -> None:
        """After a backward: the gradient stays where it is, goes to host memory, or is reduced."""
        what = str(step.op)
        self.gradient.enter(Phase.KEPT if step.end in ("keep", None) else Phase.LEAVING, what)
        if step.end == "reduce":
            self._start_reduction(step)
        elif step.end == "offload" and self.gradient.slot is not None:
            self._offload_partial(self.gradient.slot)
            self.gradient.leave(what)
        self._unbind_gradient()

    def _gradient_parts(self, slot: StateSlot) -> list[Tensor]:
        return parts_of(self.unit.trained_buckets, slot.flat)

    def _unbind_gradient(self) -> None:
        if self.unit.places.gradients_in_slot:
            self._buffers.data_parallel.bind_gradients(self.unit, None)

    def _offload_partial(self, slot: StateSlot) -> None:
        """Copy the sum of the microbatches so far, not yet reduced, to host memory."""
        self._buffers.follow(Stream.OFFLOAD, Stream.COMPUTE)
        for index, (bucket, part) in enumerate(zip(self.unit.trained_buckets, self._gradient_parts(slot), strict=True)):
            self._backend.copy(Stream.OFFLOAD, given(bucket.partial), part, partial_name(bucket), slot.name)
            self._offloaded[index] = self._backend.record(Stream.OFFLOAD)
        slot.free = self._backend.record(Stream.OFFLOAD)

    # The reduction.

    def _start_reduction(self, step: StateStep) -> None:
        buffers, gradient, slot = self._buffers, self.gradient, self.gradient.slot
        wholes = [given(b.gradients) for b in self.unit.trained_buckets] if slot is None else self._gradient_parts(slot)
        self.gradient = self._new_gradient()  # the next microbatch may begin before this reduction has ended
        sums = self._fetch_sums() if step.adds_up and self.unit.places.optimizer_on_host else []
        if buffers.num_shards == 1:
            self.reduction = Reduction(step, gradient, wholes, [], None, sums)
            return
        stage = in_turn(buffers.reduced)
        self._backend.wait(Stream.COMPUTE, stage.free)
        self._backend.access(Stream.COMPUTE, stage.name, "w", f"reduction of {step.op}")
        parts, works = parts_of(self.unit.trained_buckets, stage.flat, shards=True), []
        for whole, part in zip(wholes, parts, strict=True):
            _, work = reduce_scatter_async(whole, buffers.data_parallel.group, out=part)
            works += [] if work is None else [work]
        self.reduction = Reduction(step, gradient, parts, works, stage, sums)

    def finish_reduction(self, update: Update | None) -> None:
        """Wait for the reduction, and copy the shard to the memory that holds the masters.

        `update`: starts the update of this layer as soon as its gradient is complete there.
        """
        reduction, self.reduction = self.reduction, None
        if reduction is None:
            raise PlanError(f"finish_reduction: the gradient of layer {self.layer} is not being reduced")
        for work in reduction.works:
            work.wait()
        record, on_host = self.unit.ring_record, self.unit.places.optimizer_on_host
        if record is not None:
            self._clear_record(record, update)
        for index, part in enumerate(reduction.parts):
            self._deliver(index, part, reduction)
        released = self._backend.record(Stream.OFFLOAD if on_host else Stream.COMPUTE)
        if reduction.stage is not None:
            reduction.stage.free = released
            released = self._backend.record(Stream.COMPUTE)
        if reduction.gradient.slot is not None:
            reduction.gradient.slot.free = released
        reduction.gradient.leave(f"end of the reduction of {reduction.step.op}")
        if on_host and self.unit.trained_buckets and reduction.step.is_last and update is not None:
            done = self._start_update(update)
            self.begin_update(done)
            if record is not None:
                self._buffers.updates[record] = done

    def check_reduced(self) -> None:
        """Raises PlanError unless the gradient of the last microbatch was reduced, and all copies of it are issued."""
        left = self.gradient if self.reduction is None else self.reduction.gradient
        if not left.is_at_rest:
            raise PlanError(f"await_gradients: {left.name} is still {left.phase.value!r}, and not reduced")

    def _clear_record(self, record: int, update: Update | None) -> None:
        """Wait until the layer whose gradient is in this record of the ring has been updated."""
        if update is None:
            raise PlanError("gradients that are consumed as they arrive need train_step(), which says with which rate")
        if record in self._buffers.updates:
            self._buffers.updates[record].result()
            self._buffers.written = self._backend.record(Stream.HOST)

    def _start_update(self, update: Update) -> Future[None]:
        event = self._backend.record(Stream.OFFLOAD)

        def wait() -> None:
            self._backend.wait(Stream.HOST, event)
            for bucket in self.unit.trained_buckets:
                self._backend.access(Stream.HOST, gradient_name(bucket), "r", "update")

        return update(self.unit, wait)

    def _deliver(self, index: int, shard: Tensor, reduction: Reduction) -> None:
        """Add the reduced gradient of earlier microbatches, complete the sum after the last one, and store it."""
        bucket, step, data_parallel = self.unit.trained_buckets[index], reduction.step, self._buffers.data_parallel
        if not bucket.places.optimizer_on_host:
            if step.is_first:
                bucket.gradient_shard.copy_(shard)
            else:
                bucket.gradient_shard.add_(shard)
            if step.is_last:
                data_parallel.main_gradients.complete([(bucket, bucket.gradient_shard)])
            return
        if reduction.sums:
            self._add_sum(reduction.sums[index], shard)
        if step.is_last:
            data_parallel.main_gradients.complete([(bucket, shard)])
        holder = reduction.stage or reduction.gradient.slot
        name = name_of("gradient", bucket) if holder is None else holder.name
        self._offloaded[index] = self._buffers.offload_gradient(bucket, shard, name)

    def _fetch_sums(self) -> list[Tensor]:
        """Copy the sum of earlier microbatches from host memory, while the reduction of this one runs."""
        backend, (stage,) = self._backend, self._buffers.sum
        backend.wait(Stream.PREFETCH, stage.free)
        self._buffers.spoil(stage)
        parts = parts_of(self.unit.trained_buckets, stage.flat, shards=True)
        for bucket, part, away in zip(self.unit.trained_buckets, parts, self._offloaded, strict=True):
            backend.wait(Stream.PREFETCH, away)
            backend.copy(Stream.PREFETCH, part, bucket.gradient_shard, stage.name, gradient_name(bucket))
        stage.filled = backend.record(Stream.PREFETCH)
        return parts

    def _add_sum(self, part: Tensor, shard: Tensor) -> None:
        backend, (stage,) = self._backend, self._buffers.sum
        backend.wait(Stream.COMPUTE, stage.filled)
        backend.access(Stream.COMPUTE, stage.name, "r", "sum of gradients")
        shard.add_(part)
        stage.free = backend.record(Stream.COMPUTE)

"""Executes the state plan: gives slots to layers whose weights or gradients are not resident, and copies their states.

    prefetch   | weights of layer i+1 |  (from host memory or this rank's shard; gathered over dp x cp)
    compute    | layer i                         | layer i+1
    offload               | gradient of layer i-1, reduced |

A layer's parameters are views of its slot while it runs, and NaN at any other time. The CPU, which updates masters in
host memory, counts as one more stream (`Stream.HOST`): a copy waits for the update of what it reads, and an update
waits for the copies that read what it overwrites.
"""

from collections.abc import Mapping

from torch import Tensor

from memo.errors import PlanError
from memo.executor.state_buffers import StateSlot
from memo.executor.state_gradients import GradientStreamer, Update, given, gradient_name, name_of, source_name
from memo.executor.streams import Stream, StreamBackend
from memo.parallel.collectives import all_gather_async
from memo.parallel.data import ShardedDataParallel
from memo.parallel.units import Bucket, Unit
from memo.planner.state_plan import Fetch, StatePlan, StateStep
from memo.units import format_bytes


class StateStreamer(GradientStreamer):
    """The `StateMover` of one rank; each `StreamedLayer` calls it before and after its layer."""

    def __init__(
        self,
        plan: StatePlan,
        data_parallel: ShardedDataParallel,
        layers: Mapping[int, int],
        backend: StreamBackend,
        poison: bool = False,
    ) -> None:
        """`layers`: position on this rank, by global index. `poison`: fill slots with NaN before they are reused."""
        units = {layer: data_parallel.layer_units[position] for layer, position in layers.items()}
        super().__init__(plan, units, data_parallel, backend, poison)
        self._order = list(layers)
        self._on_host = [b for b in data_parallel.buckets if b.places.optimizer_on_host]
        self._position = 0
        self._is_settled = True  # whether the last step reached the optimizer

    @property
    def device_bytes(self) -> int:
        """Bytes of slots and stages on the device."""
        return self._buffers.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena of states in host memory, and of the stages for weights that return to the device."""
        arena = self.data_parallel.host
        return self._buffers.host_bytes + (0 if arena is None else arena.record(0).nbytes)

    def describe(self) -> str:
        """A text that says where the states of this rank are."""
        units = self._units.values()
        host, weights, gradients = (
            sum(getattr(unit.places, name) for unit in units)
            for name in ("optimizer_on_host", "weights_in_slot", "gradients_in_slot")
        )
        sharded = f", shards of {self._num_shards} ranks" if self._num_shards > 1 else ""
        return (
            f"states of {len(units)} layers on this rank{sharded}: masters and moments of {host} in host memory, "
            f"weights of {weights} and gradients of {gradients} in slots\n"
            f"{format_bytes(self.host_bytes)} of host memory; slots {format_bytes(self.device_bytes)}: "
            f"{self.plan.num_weight_slots} for weights, {self.plan.num_gradient_slots} for gradients; "
            f"{self.plan.num_fetches} fetches a step"
        )

    # Around each step.

    def next_step(self, update: Update | None = None) -> None:
        """Call it before each training step, also after one that an exception has interrupted.

        `update`: updates layers during backward, each as soon as its gradient is in host memory.
        """
        if not self._is_settled:
            self._interrupt()
        for unit in self._units.values():
            self._release(unit)
        self.forget()
        self._position, self._is_settled = 0, False
        self._update = update
        self._updates.clear()
        self._follow(Stream.COMPUTE, Stream.HOST)  # the host has waited for all gradients, even if the step was skipped
        for bucket in self._on_host:
            self._touch_weights(bucket, "forward")
            self._touch_gradient(bucket, "zeroing")

    def forget(self) -> None:
        """Treat the weights in slots as invalid, because the weights may have changed; later fetches wait for that."""
        # This event follows the update of shards on the device, and every use of a slot, even an interrupted one.
        updated = self.backend.record(Stream.COMPUTE)
        for slot in self._buffers.weights:
            slot.layer, slot.free = None, updated
        self._written = self.backend.record(Stream.HOST)

    def _interrupt(self) -> None:
        """Wait for all messages and copies that an interrupted step has left running."""
        works = [work for slot in self._buffers.weights for work in slot.works]
        works += [] if self._pending is None else self._pending.works
        for work in works:
            work.wait()
        self._pending = None
        self.backend.synchronize()

    def _touch_weights(self, bucket: Bucket, what: str) -> None:
        if bucket.places.optimizer_on_host and bucket.weights is not None:
            self.backend.access(Stream.COMPUTE, name_of("weights", bucket), "r", what)

    def _touch_gradient(self, bucket: Bucket, what: str) -> None:
        if bucket.places.optimizer_on_host and bucket.gradients is not None:
            self.backend.access(Stream.COMPUTE, name_of("gradient", bucket), "w", what)

    # Around each operation of a training step.

    def begin(self, kind: str, layer: int) -> None:
        """Before an operation of a layer: bind its weights and, for a backward, its main gradient to valid memory."""
        step, unit = self._expect(kind, layer), self._units[layer]
        self._settle_slots(step)
        # Declared before any wait, so that the race checker does not take the waits for slots as their order.
        for bucket in unit.buckets:
            self._touch_weights(bucket, str(step.op))
            if kind == "B":
                self._touch_gradient(bucket, str(step.op))
        for fetch in step.fetches:
            self._fetch(fetch)
        if step.weight_slot is not None:
            self._lend_weights(unit, self._buffers.weights[step.weight_slot], str(step.op))
        if step.gradient_slot is not None:
            self._lend_gradient(unit, self._buffers.gradients[step.gradient_slot], step)

    def end(self, kind: str, layer: int) -> None:
        """After an operation of a layer: release its slots, and start the reduction or the copy of its gradient."""
        step, unit = self._expect(kind, layer), self._units[layer]
        self._position += 1
        if step.weight_slot is not None:
            self._buffers.weights[step.weight_slot].free = self.backend.record(Stream.COMPUTE)
        self.finish_gradients()  # of a backward before this operation, which has hidden its reduction
        slot = None if step.gradient_slot is None else self._buffers.gradients[step.gradient_slot]
        if step.end == "reduce":
            self._start_reduction(unit, step, slot)
        elif step.end == "offload" and slot is not None:
            self._offload_partial(unit, slot)
        self._release(unit)

    def begin_unplanned(self, layer: int) -> None:
        """As `begin`, for a forward that is not in the plan (evaluation); also fetches the next layer's weights."""
        for bucket in self._units[layer].buckets:
            self._touch_weights(bucket, f"forward of layer {layer}")
        following = self._order[(self._order.index(layer) + 1) % len(self._order)]
        for wanted in (layer, following):
            if self._units[wanted].places.weights_in_slot and wanted not in [
                slot.layer for slot in self._buffers.weights
            ]:
                others = [slot for slot in self._buffers.weights if slot.layer != layer]
                if others:  # with a single slot the next layer cannot be fetched yet
                    self._fetch_weights(wanted, others[0])
        slot = next((slot for slot in self._buffers.weights if slot.layer == layer), None)
        if slot is not None:
            self._lend_weights(self._units[layer], slot, f"forward of layer {layer}")

    def end_unplanned(self, layer: int) -> None:
        for slot in self._buffers.weights:
            if slot.layer == layer:
                slot.free = self.backend.record(Stream.COMPUTE)
        self._release(self._units[layer])

    def _expect(self, kind: str, layer: int) -> StateStep:
        if self._position < len(self.plan.steps):
            step = self.plan.steps[self._position]
            if (step.op.kind, step.op.layer) == (kind, layer):
                return step
            comes = f"{step.op} comes next"
        else:
            comes = "it has ended"
        raise PlanError(
            f"{kind} of layer {layer}, but in the state plan {comes} (step {self._position} of"
            f" {len(self.plan.steps)}): plan for the schedule that runs, or next_step() after an interrupted one"
        )

    def _release(self, unit: Unit) -> None:
        if unit.places.weights_in_slot:
            self.data_parallel.bind_weights(unit, None)
        if unit.places.gradients_in_slot:
            self.data_parallel.bind_gradients(unit, None)

    # Weights.

    def _fetch(self, fetch: Fetch) -> None:
        if fetch.kind == "weights":
            self._fetch_weights(fetch.layer, self._buffers.weights[fetch.slot])
        else:
            self._fetch_partial(self._units[fetch.layer], self._buffers.gradients[fetch.slot])

    def _fetch_weights(self, layer: int, slot: StateSlot) -> None:
        backend, unit = self.backend, self._units[layer]
        for unused in slot.works:  # gathers of a layer that was fetched but did not run
            unused.wait()
        backend.wait(Stream.PREFETCH, slot.free)
        backend.wait(Stream.PREFETCH, self._written)
        self._spoil(slot)
        shards = self._bring_shards(unit, slot)
        slot.works = []
        if self._num_shards > 1:
            wholes = unit.parts(slot.flat)
            with backend.issuing(Stream.PREFETCH):
                for bucket, shard, whole in zip(unit.buckets, shards, wholes, strict=True):
                    if not bucket.places.optimizer_on_host:
                        backend.access(Stream.PREFETCH, name_of("shard", bucket), "r", f"gather of layer {layer}")
                    _, gather = all_gather_async(shard, self.data_parallel.group, out=whole)
                    slot.works += [] if gather is None else [gather]
            backend.access(Stream.PREFETCH, slot.name, "w", f"gather of layer {layer}")
        slot.layer, slot.filled = layer, backend.record(Stream.PREFETCH)

    def _bring_shards(self, unit: Unit, slot: StateSlot) -> list[Tensor]:
        """Copy this rank's shard of each bucket to the device: into the slot itself if there is only one shard."""
        if not unit.places.optimizer_on_host:
            return [given(bucket.source) for bucket in unit.buckets]
        flat, name = (slot.flat, slot.name) if slot.shard is None else (slot.shard, f"{slot.name} shard")
        shards = unit.shard_parts(flat)
        for bucket, shard in zip(unit.buckets, shards, strict=True):
            source, place = given(bucket.source), source_name(bucket)
            if source.dtype != shard.dtype:
                wide = self._buffers.cast[0].flat[: source.numel()]
                self.backend.copy(Stream.PREFETCH, wide, source, self._buffers.cast[0].name, place)
                source, place = wide, self._buffers.cast[0].name
            self.backend.copy(Stream.PREFETCH, shard, source, name, place)
        return shards

    def _lend_weights(self, unit: Unit, slot: StateSlot, what: str) -> None:
        self.backend.wait(Stream.COMPUTE, slot.filled)
        for work in slot.works:
            work.wait()
        slot.works = []
        self.backend.access(Stream.COMPUTE, slot.name, "r", what)
        self.data_parallel.bind_weights(unit, unit.parts(slot.flat))

    # The optimizer's step.

    def await_gradients(self) -> None:
        """Block the host until it may read the gradients in host memory and write the masters."""
        for stream in (Stream.OFFLOAD, Stream.PREFETCH):
            self._follow(Stream.HOST, stream)
        self._is_settled = True
        for bucket in self.data_parallel.buckets:
            if not bucket.places.optimizer_on_host:
                self.backend.access(Stream.COMPUTE, name_of("shard", bucket), "w", "update")
                continue
            self.backend.access(Stream.HOST, gradient_name(bucket), "w", "clipping")
            self.backend.access(Stream.HOST, name_of("masters", bucket), "w", "update")
            if bucket.source is not None:
                self.backend.access(Stream.HOST, source_name(bucket), "w", "update")

    def upload_weights(self, bucket: Bucket) -> None:
        shard = given(bucket.weight_shard)
        source, name = bucket.master, name_of("masters", bucket)
        if source.dtype != shard.dtype:
            stage = self._buffers.next_host_stage()
            self.backend.wait(Stream.HOST, stage.free)
            source, name = stage.flat[: shard.numel()], stage.name
            self.backend.access(Stream.HOST, name, "w", "cast of masters")
            source.copy_(bucket.master)
        # The old weights may be overwritten: the host has waited for the gradients' norm, or is about to load others.
        self._follow(Stream.PREFETCH, Stream.HOST)
        self.backend.copy(Stream.PREFETCH, shard, source, name_of("weights", bucket), name)
        event = self.backend.record(Stream.PREFETCH)
        if source is not bucket.master:
            stage.free = event
        self.backend.wait(Stream.COMPUTE, event)
        self._touch_weights(bucket, "gather or next use")

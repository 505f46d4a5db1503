"""Runs the state plan: gives slots to layers whose weights or gradients are not resident, and copies their states.

    prefetch   | weights of layer i+1 |  (from host memory or this rank's shard; gathered over dp x cp)
    compute    | layer i                         | layer i+1
    offload               | gradient of layer i-1, reduced |

A layer's parameters are views of its slot while it runs, and NaN at any other time. The CPU, which updates masters in
host memory, counts as one more stream (`Stream.HOST`): a copy waits for the update of the states that it reads, and an
update waits for the copies that read the states that it overwrites. The update of a layer goes on in a thread while the
next step begins, and is waited for before the layer's first use.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future

from torch import Tensor

from memo.errors import PlanError
from memo.executor.layer_states import LayerStates, Update
from memo.executor.state_buffers import StateBuffers, given, gradient_name, in_turn, name_of, source_name
from memo.executor.state_recorder import StateRecorder
from memo.executor.state_slots import Phase
from memo.executor.streams import Stream, StreamBackend
from memo.parallel.data import ShardedDataParallel
from memo.parallel.units import Bucket, Unit
from memo.planner.state_plan import StatePlan, StateStep
from memo.units import format_bytes


class StateStreamer:
    """Moves the states of each layer (memo.executor.layer_states) in the order of the plan; a rank's `StateMover`.

    Each `StreamedLayer` calls it before and after its layer.
    """

    def __init__(
        self,
        plan: StatePlan,
        data_parallel: ShardedDataParallel,
        layers: Mapping[int, int],
        backend: StreamBackend,
    ) -> None:
        """`layers` maps the global index of each layer to its position on this rank."""
        self.plan, self.data_parallel = plan, data_parallel
        units = {layer: data_parallel.layer_units[position] for layer, position in layers.items()}
        self._buffers = StateBuffers(plan, units, data_parallel, backend)
        self._layers = {layer: LayerStates(layer, unit, self._buffers) for layer, unit in units.items()}
        self._order = list(layers)
        self._at = {states.unit.layer: states for states in self._layers.values()}
        self._units_on_host = [unit for unit in data_parallel.units if unit.places.optimizer_on_host]
        self._update: Update | None = None
        self._reducing: LayerStates | None = None  # the layer whose reduction is running
        self._position = 0
        self._is_settled = True  # whether the last step reached the optimizer

    @property
    def backend(self) -> StreamBackend:
        return self._buffers.backend

    @property
    def device_bytes(self) -> int:
        """Bytes of slots and staging buffers on the device."""
        return self._buffers.device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of the arena of states in host memory, and of the staging buffers for weights that return to the
        device."""
        arena = self.data_parallel.host
        return self._buffers.host_bytes + (0 if arena is None else arena.record(0).nbytes)

    def describe(self) -> str:
        """Return a text that says where the states of this rank are."""
        all_places = [states.unit.places for states in self._layers.values()]
        host, weights, gradients = (
            sum(getattr(places, name) for places in all_places)
            for name in ("optimizer_on_host", "weights_in_slot", "gradients_in_slot")
        )
        num_shards = self._buffers.num_shards
        sharded = f", shards of {num_shards} ranks" if num_shards > 1 else ""
        return (
            f"states of {len(all_places)} layers on this rank{sharded}: masters and moments of {host} in host memory, "
            f"weights of {weights} and gradients of {gradients} in slots\n"
            f"{format_bytes(self.host_bytes)} of host memory; slots {format_bytes(self.device_bytes)}: "
            f"{self.plan.num_weight_slots} for weights, {self.plan.num_gradient_slots} for gradients; "
            f"{self.plan.num_fetches} fetches a step"
        )

    @contextlib.contextmanager
    def recorded(self, earlier: StateRecorder | None = None) -> Iterator[StateRecorder]:
        """Time copies until the end of the block, which must begin between two steps. `earlier`: see StateRecorder."""
        backend = self._buffers.backend
        recorder = self._buffers.backend = StateRecorder(backend, earlier)
        try:
            yield recorder
        finally:
            self._buffers.backend = backend

    # Around each step.

    def next_step(self, update: Update | None = None) -> None:
        """Call it before each training step, also after one that an exception has interrupted.

        `update`: updates layers during backward, each as soon as its gradient is in host memory.
        """
        if not self._is_settled:
            self._interrupt()
        for slot in self._buffers.gradients:
            slot.holder = None
        self.forget()
        for states in self._layers.values():
            states.begin_step()
        self._position, self._is_settled = 0, False
        self._update = update
        self._buffers.updates.clear()
        self._buffers.follow(Stream.COMPUTE, Stream.HOST)  # HOST waited for all gradients, even in a skipped step
        for unit in self._units_on_host:
            for bucket in unit.buckets:
                if unit.layer is None:  # weights of layers are declared when they are used
                    self._buffers.touch_weights(bucket, "forward")
                self._buffers.touch_gradient(bucket, "zeroing")

    def forget(self) -> None:
        """Treat the weights in slots as invalid, because weights may have changed; later fetches wait for that."""
        # This event follows the update of shards on the device and every use of a slot, even an interrupted use.
        updated = self.backend.record(Stream.COMPUTE)
        for slot in self._buffers.weights:
            if slot.holder is not None:
                slot.holder.let_go()
            slot.free = updated
        self._buffers.written = self.backend.record(Stream.HOST)

    def _interrupt(self) -> None:
        """Wait for all messages and copies that an interrupted step has left running."""
        works = [work for slot in self._buffers.weights for work in slot.works]
        if self._reducing is not None and self._reducing.reduction is not None:
            works += self._reducing.reduction.works
        for work in works:
            work.wait()
        self._reducing = None
        self.backend.synchronize()

    # Around each operation of a training step.

    def begin(self, kind: str, layer: int) -> None:
        """Before an operation of a layer: bind its weights and, for a backward, its main gradient to valid memory."""
        step, states = self._expect(kind, layer), self._layers[layer]
        self._settle_slots(step)
        self._receive(states)
        # Declared before any wait: a wait for a slot must not hide from the race checker that an order is missing.
        states.touch(kind, str(step.op))
        for fetch in step.fetches:
            if fetch.kind == "weights":
                self._layers[fetch.layer].fetch_weights(self._buffers.weights[fetch.slot])
            else:
                self._layers[fetch.layer].fetch_gradient(self._buffers.gradients[fetch.slot])
        states.lend_weights(str(step.op))
        if kind == "B":
            slot = None if step.gradient_slot is None else self._buffers.gradients[step.gradient_slot]
            states.lend_gradient(step, slot)

    def end(self, kind: str, layer: int) -> None:
        """After an operation of a layer: release its slots, and start to reduce or to copy its gradient."""
        step, states = self._expect(kind, layer), self._layers[layer]
        self._position += 1
        states.return_weights(str(step.op))
        self.finish_gradients()  # of an earlier backward, whose reduction this operation has hidden
        if kind == "B":
            states.return_gradient(step)
            self._reducing = states if step.end == "reduce" else None

    def begin_unplanned(self, layer: int) -> None:
        """Before a forward outside of the plan (evaluation): bind the weights, and fetch those of the next layer."""
        states, what = self._layers[layer], f"forward of layer {layer}"
        for other in self._layers.values():
            if other.weights.phase is Phase.IN_USE:  # an exception has ended its operation
                other.return_weights(what)
        self._receive(states)
        states.touch("F", what)
        following = self._order[(self._order.index(layer) + 1) % len(self._order)]
        for wanted in (states, self._layers[following]):
            others = [slot for slot in self._buffers.weights if slot.holder is not states.weights]
            if wanted.weights.phase is Phase.AWAY and others:  # with a single slot the next layer must wait
                wanted.fetch_weights(others[0])
        states.lend_weights(what)

    def end_unplanned(self, layer: int) -> None:
        self._layers[layer].return_weights(f"forward of layer {layer}")

    def _receive(self, states: LayerStates) -> None:
        """Before a use of a layer: wait for its update, and bring weights that stay on the device up to date.

        These are gathered in every step, even if nothing has changed them, because a memory plan needs every step to
        make the same requests.
        """
        states.await_update()
        places = states.unit.places
        if places.optimizer_on_host and not places.weights_in_slot and not states.is_up_to_date:
            for bucket in states.unit.trained_buckets:
                if states.is_updated:
                    self.upload_weights(bucket)
                self.data_parallel.gather_weights(bucket)
            states.is_updated, states.is_up_to_date = False, True

    def _expect(self, kind: str, layer: int) -> StateStep:
        step = None if self._position == len(self.plan.steps) else self.plan.steps[self._position]
        if step is None or (step.op.kind, step.op.layer) != (kind, layer):
            raise self._refused(f"{kind} of layer {layer}")
        return step

    def _refused(self, call: str) -> PlanError:
        ended = self._position == len(self.plan.steps)
        comes = "it has ended" if ended else f"{self.plan.steps[self._position].op} comes next"
        return PlanError(
            f"{call}, but in the state plan {comes} (step {self._position} of {len(self.plan.steps)}):"
            " plan for the schedule that runs, or next_step() after an interrupted one"
        )

    def _settle_slots(self, step: StateStep) -> None:
        """Before an operation: finish the pending reduction if another layer now takes its slot.

        On a single rank also finish it, because a reduction without messages has nothing to hide behind the operation.
        """
        pending = None if self._reducing is None else self._reducing.reduction
        if pending is None:
            return
        taken = [fetch.slot for fetch in step.fetches if fetch.kind == "gradient"]
        taken += [] if step.gradient_slot is None else [step.gradient_slot]
        if not pending.works or any(pending.gradient.slot is self._buffers.gradients[slot] for slot in taken):
            self.finish_gradients()

    # At the end of a step, called by memo.parallel.data and memo.train.optimizer.

    def finish_gradients(self) -> None:
        """Wait for the pending reduction, if there is one, and copy its shard to the memory that holds the masters."""
        states, self._reducing = self._reducing, None
        if states is not None:
            states.finish_reduction(self._update)

    def offload_gradient(self, bucket: Bucket, reduced: Tensor) -> None:
        self._buffers.offload_gradient(bucket, reduced, name_of("gradient", bucket))

    def await_gradients(self) -> None:
        """Block the host until it may read the gradients in host memory and write the masters.

        Raises PlanError in the middle of a step, or if a gradient has not been reduced and offloaded.
        """
        if not self._is_settled and self._position < len(self.plan.steps):
            raise self._refused("await_gradients")
        for states in self._layers.values():
            states.check_reduced()
        for stream in (Stream.OFFLOAD, Stream.PREFETCH):
            self._buffers.follow(Stream.HOST, stream)
        self._is_settled = True
        for bucket in self.data_parallel.trained_buckets:
            if not bucket.places.optimizer_on_host:
                self.backend.access(Stream.COMPUTE, name_of("shard", bucket), "w", "update")
                continue
            self.backend.access(Stream.HOST, gradient_name(bucket), "w", "clipping")
            self.backend.access(Stream.HOST, name_of("masters", bucket), "w", "update")
            if bucket.source is not None:
                self.backend.access(Stream.HOST, source_name(bucket), "w", "update")

    def in_order_of_updates(self, units: Sequence[Unit]) -> list[Unit]:
        """Embedding and head, which are updated at once, then layers in the order in which the next step needs them."""
        rank = {self._layers[layer].unit.layer: index for index, layer in enumerate(self.plan.by_first_need)}
        return sorted(units, key=lambda unit: rank.get(unit.layer, -1))

    def update_later(self, position: int, update: Future[None]) -> None:
        """Take note that a thread updates the masters of the layer at `position`; its first use waits for that."""
        self._at[position].begin_update(update)

    def await_updates(self) -> None:
        """Block the host until it may read the masters of all layers."""
        for states in self._layers.values():
            states.await_update()

    def receive_all(self) -> None:
        """Bring all weights that stay on the device up to date; collective over dp x cp."""
        for states in self._layers.values():
            self._receive(states)

    def upload_weights(self, bucket: Bucket) -> None:
        shard = given(bucket.weights)[bucket.mine]
        source, name = bucket.master, name_of("masters", bucket)
        if source.dtype != shard.dtype:
            stage = in_turn(self._buffers.host_stages)
            self.backend.wait(Stream.HOST, stage.free)
            source, name = stage.flat[: shard.numel()], stage.name
            self.backend.access(Stream.HOST, name, "w", "cast of masters")
            source.copy_(bucket.master)
        # No backward reads the old weights any more: the host has waited for the gradients' norm, or loads new weights.
        self._buffers.follow(Stream.PREFETCH, Stream.HOST)
        self.backend.copy(Stream.PREFETCH, shard, source, name_of("weights", bucket), name)
        event = self.backend.record(Stream.PREFETCH)
        if source is not bucket.master:
            stage.free = event
        self.backend.wait(Stream.COMPUTE, event)
        self._buffers.touch_weights(bucket, "gather or next use")

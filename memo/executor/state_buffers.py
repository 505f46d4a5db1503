"""Rounding buffers that the streamed layers of one rank share, the streams that fill and empty them, and their names.

Rounding buffers are of two kinds: slots, each as large as a layer, and stages, which hold shards for a short time.
"""

from collections.abc import Mapping
from concurrent.futures import Future

import torch
from torch import Tensor

from memo.executor.state_slots import StateSlot
from memo.executor.streams import Event, Stream, StreamBackend
from memo.parallel.collectives import group_size
from memo.parallel.data import ShardedDataParallel
from memo.parallel.units import Bucket, Unit, shard_size_of, size_of
from memo.planner.state_plan import StatePlan
from memo_kernels import wide_dtype


class StateBuffers:
    """All buffers of streaming, which live as long as the run, and the events that order their uses by layers.

    Attributes:
        backend: the streams; it is replaced while copies are timed.
        weights, gradients: slots.
        reduced: stages for reduced gradients on the device; none on a single rank, where the slot itself is used.
        cast: a stage for masters that are cast to weights on the device.
        sum: a stage for the sum of sharded gradients, fetched from host memory to be added to a new gradient.
        written: event after the CPU's last write to host memory.
        updates: by record of the ring of gradients, the update of the layer whose gradient the record holds.
    """

    def __init__(
        self,
        plan: StatePlan,
        units: Mapping[int, Unit],
        data_parallel: ShardedDataParallel,
        backend: StreamBackend,
    ) -> None:
        self.data_parallel, self.backend = data_parallel, backend
        self.num_shards = group_size(data_parallel.group)
        layers = list(units.values())
        narrow, wide = data_parallel.dtype, wide_dtype(data_parallel.dtype)
        size, shard = max(size_of(u.buckets) for u in layers), max(shard_size_of(u.buckets) for u in layers)
        gradient_size = max(size_of(u.trained_buckets) for u in layers)
        reduced = max(shard_size_of(u.trained_buckets) for u in layers)
        is_split = self.num_shards > 1
        num_driven = sum(unit.is_driven for unit in layers)
        receives_shard = is_split and any(u.places.optimizer_on_host and u.places.weights_in_slot for u in layers)
        cast = [b.plan.shard_size for u in layers for b in u.trained_buckets if b.source is b.master and narrow != wide]
        adds = any(step.adds_up and units[step.op.layer].places.optimizer_on_host for step in plan.steps)
        uploaded = [
            b
            for b in data_parallel.trained_buckets
            if b.places.optimizer_on_host and b.weights is not None and narrow != wide
        ]
        self.weights = self._slots("weights slot", plan.num_weight_slots, size, narrow, shard if receives_shard else 0)
        self.gradients = self._slots("gradient slot", plan.num_gradient_slots, gradient_size, wide)
        self.reduced = self._slots("reduced gradient", min(2, num_driven) if is_split else 0, reduced, wide)
        self.cast = self._slots("masters", int(bool(cast)), max(cast, default=0), wide)
        self.sum = self._slots("gradient sum", int(adds), reduced, wide)
        self.host_stages = self._make_host_stages(max((b.plan.shard_size for b in uploaded), default=0), narrow)
        allocated = backend.record(Stream.COMPUTE)  # after all earlier uses of this memory
        for slot in self._on_device:
            slot.free = allocated
        self.written: Event = None
        self.updates: dict[int, Future[None]] = {}

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.nbytes + (0 if slot.shard is None else slot.shard.nbytes) for slot in self._on_device)

    @property
    def host_bytes(self) -> int:
        return sum(stage.flat.nbytes for stage in self.host_stages)

    @property
    def _on_device(self) -> list[StateSlot]:
        return [*self.weights, *self.gradients, *self.reduced, *self.cast, *self.sum]

    def follow(self, stream: Stream, other: Stream) -> None:
        """Make `stream` wait for everything issued on `other` so far."""
        self.backend.wait(stream, self.backend.record(other))

    def spoil(self, slot: StateSlot) -> None:
        """Declare that the old content of a slot, which is filled next, is not valid any more."""
        self.backend.spoil(Stream.PREFETCH, slot.flat, slot.name)
        if slot.shard is not None:
            self.backend.spoil(Stream.PREFETCH, slot.shard, f"{slot.name} shard")

    def offload_gradient(self, bucket: Bucket, reduced: Tensor, name: str) -> Event:
        """Copy a reduced gradient, in the memory of this name, to host memory; returns the event after the copy."""
        self.follow(Stream.OFFLOAD, Stream.COMPUTE)
        self.backend.wait(Stream.OFFLOAD, self.written)
        self.backend.copy(Stream.OFFLOAD, bucket.gradient_shard, reduced, gradient_name(bucket), name)
        return self.backend.record(Stream.OFFLOAD)

    def touch_weights(self, bucket: Bucket, what: str) -> None:
        """Declare that compute reads resident weights whose masters are in host memory."""
        if bucket.places.optimizer_on_host and bucket.weights is not None:
            self.backend.access(Stream.COMPUTE, name_of("weights", bucket), "r", what)

    def touch_gradient(self, bucket: Bucket, what: str) -> None:
        """Declare that compute writes a resident gradient whose masters are in host memory."""
        if bucket.places.optimizer_on_host and bucket.gradients is not None:
            self.backend.access(Stream.COMPUTE, name_of("gradient", bucket), "w", what)

    def _slots(self, name: str, count: int, numel: int, dtype: torch.dtype, shard: int = 0) -> list[StateSlot]:
        """`shard`: elements of the stage that each slot gets for its shard; 0: none."""
        return [
            StateSlot(f"{name} {i}", self._empty(numel, dtype), self._empty(shard, dtype) if shard else None)
            for i in range(count)
        ]

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        empty = torch.empty(numel, dtype=dtype, device=self.data_parallel.device)
        self.backend.spoil(Stream.COMPUTE, empty, "new memory")
        return empty

    def _make_host_stages(self, numel: int, dtype: torch.dtype) -> list[StateSlot]:
        """Two stages in host memory for weights that are copied to the device."""
        if not numel:
            return []
        make = self.data_parallel.host_memory
        assert make is not None, "states in host memory need its arena"
        self._arena = make(2 * numel * dtype.itemsize)  # kept alive, because the stages are views of it
        parts = self._arena.record(0).view(dtype).chunk(2)
        return [StateSlot(f"host staging {i}", part) for i, part in enumerate(parts)]


def in_turn(stages: list[StateSlot]) -> StateSlot:
    """Return the next of one or two stages, which take turns."""
    stage = stages[0]
    stages.reverse()
    return stage


def given(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "the placement gives this bucket no such memory"
    return tensor


def name_of(kind: str, bucket: Bucket) -> str:
    """The name of a bucket's memory for the race checker."""
    return f"{kind} of {bucket.plan.ranges[0].name}"


def source_name(bucket: Bucket) -> str:
    return name_of("masters" if bucket.source is bucket.master else "host weights", bucket)


def gradient_name(bucket: Bucket) -> str:
    """The name of a reduced gradient's record in host memory, which several layers may use in turn."""
    return name_of("host gradient", bucket) if bucket.ring_record is None else f"gradient record {bucket.ring_record}"


def partial_name(bucket: Bucket) -> str:
    one_record = bucket.partial is bucket.gradient_shard
    return gradient_name(bucket) if one_record else name_of("host sum", bucket)

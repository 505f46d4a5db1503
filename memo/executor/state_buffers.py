"""The rounding buffers of streamed states on one rank: slots, and stages that hold shards for a short time."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import Work

from memo.executor.streams import Event
from memo.parallel.collectives import group_size
from memo.parallel.data import ShardedDataParallel
from memo.parallel.units import Unit, wide_dtype
from memo.planner.state_plan import StatePlan


@dataclass
class StateSlot:
    """A rounding buffer of states.

    Attributes:
        shard: receives this rank's shard before it is gathered; None if nothing is gathered from host memory.
        filled, works: the copies and messages to wait for before its content is used.
        free: the event to wait for before it is overwritten.
    """

    name: str
    flat: Tensor
    shard: Tensor | None = None
    layer: int | None = None
    filled: Event = None
    works: list[Work] = field(default_factory=list)
    free: Event = None


class StateBuffers:
    """All buffers of streaming, which live as long as the run.

    Attributes:
        weights, gradients: slots, each as large as a layer.
        reduced: stages for reduced gradients on the device; none on a single rank, where the slot itself is used.
        cast: a stage for masters that are cast to weights on the device.
        sum: a stage for the sum of sharded gradients that is fetched from host memory to be added to.
    """

    def __init__(
        self, plan: StatePlan, units: Mapping[int, Unit], data_parallel: ShardedDataParallel, poison: bool
    ) -> None:
        """`poison`: fill new buffers with NaN."""
        self._data_parallel, self._poison = data_parallel, poison
        layers, buckets = list(units.values()), data_parallel.buckets
        narrow, wide = data_parallel.dtype, wide_dtype(data_parallel.dtype)
        size, shard = max(unit.size for unit in layers), max(unit.shard_size for unit in layers)
        is_split = group_size(data_parallel.group) > 1
        num_driven = sum(unit.is_driven for unit in layers)
        arrives = is_split and any(u.places.optimizer_on_host and u.places.weights_in_slot for u in layers)
        cast = [b.plan.shard_size for u in layers for b in u.buckets if b.source is b.master and narrow != wide]
        adds = any(step.adds_up and units[step.op.layer].places.optimizer_on_host for step in plan.steps)
        uploaded = [b for b in buckets if b.places.optimizer_on_host and b.weights is not None and narrow != wide]
        self.weights = self._slots("weights slot", plan.num_weight_slots, size, narrow, shard if arrives else 0)
        self.gradients = self._slots("gradient slot", plan.num_gradient_slots, size, wide)
        self.reduced = self._slots("reduced gradient", min(2, num_driven) if is_split else 0, shard, wide)
        self.cast = self._slots("masters", int(bool(cast)), max(cast, default=0), wide)
        self.sum = self._slots("gradient sum", int(adds), shard, wide)
        self._host_stages = self._make_host_stages(max((b.plan.shard_size for b in uploaded), default=0), narrow)

    @property
    def slots(self) -> list[StateSlot]:
        """All buffers on the device."""
        return [*self.weights, *self.gradients, *self.reduced, *self.cast, *self.sum]

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.nbytes + (0 if slot.shard is None else slot.shard.nbytes) for slot in self.slots)

    @property
    def host_bytes(self) -> int:
        return sum(stage.flat.nbytes for stage in self._host_stages)

    def next_host_stage(self) -> StateSlot:
        """One of the two stages in host memory for weights that are copied to the device, in turn."""
        stage = self._host_stages[0]
        self._host_stages.reverse()
        return stage

    def _slots(self, name: str, count: int, numel: int, dtype: torch.dtype, shard: int = 0) -> list[StateSlot]:
        """`shard`: elements of the stage that each slot gets for its shard; 0: none."""
        return [
            StateSlot(f"{name} {i}", self._empty(numel, dtype), self._empty(shard, dtype) if shard else None)
            for i in range(count)
        ]

    def _empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        empty = torch.empty(numel, dtype=dtype, device=self._data_parallel.device)
        return empty.fill_(float("nan")) if self._poison else empty

    def _make_host_stages(self, numel: int, dtype: torch.dtype) -> list[StateSlot]:
        if not numel:
            return []
        make = self._data_parallel.host_memory
        assert make is not None, "states in host memory need its arena"
        self._arena = make(2 * numel * dtype.itemsize)  # kept alive, because the stages are views of it
        parts = self._arena.record(0).view(dtype).chunk(2)
        return [StateSlot(f"host staging {i}", part) for i, part in enumerate(parts)]

"""The states of one layer, or of one end of the model, and where this rank keeps them.

    resident    weights | gradients | masters (shard)                      all on the device
    host        masters | reduced gradient | moments (shard)               in host memory, with a copy of the weights
    slot        weights or gradients exist only while the layer runs       a rounding buffer of memo.executor.states

`memo.spec.placement` says which, `memo.spec.buckets` where each parameter lies in the flat buffers.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from memo.spec.buckets import BucketPlan, Slot
from memo.spec.placement import LayerPlaces

_HOST_ALIGNMENT = 64


class HostMemory(Protocol):
    """An arena of exact size in host memory (memo.executor.host_pool)."""

    def record(self, index: int) -> Tensor:
        """uint8, all of it, for index 0."""


class Carver:
    """Cuts flat tensors from the host arena, one behind the other."""

    def __init__(self, arena: Tensor) -> None:
        self._arena, self._used = arena, 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros."""
        num_bytes = numel * dtype.itemsize
        part = self._arena[self._used : self._used + num_bytes].view(dtype)
        self._used += aligned_bytes(num_bytes)
        return part.zero_()


class Bucket:
    """The memory of one bucket on one rank.

    Attributes:
        weights, gradients: flat, of the whole bucket; None while they exist in slots alone.
        master, gradient_shard: this rank's shard as the optimizer sees it, on the side where it is updated.
        moments: of the shard, where they must lie in the host arena; None where the optimizer makes them.
        source: what fills a weight slot with this rank's shard; None where weights are resident.
        partial: host record of the whole gradient between two microbatches.
        squared_norm: of the reduced gradient, fp64, told when it left the device.
    """

    def __init__(
        self,
        plan: BucketPlan,
        rank: int,
        dtype: torch.dtype,
        device: torch.device,
        places: LayerPlaces,
        host: Carver | None,
        *,
        rules: "HostRules",
        ring: Tensor | None = None,
    ) -> None:
        """`ring`: where the reduced gradient lies until the CPU has consumed it, shared with other layers."""
        self.plan, self.places, self.device = plan, places, device
        wide = wide_dtype(dtype)
        self.mine = slice(rank * plan.shard_size, (rank + 1) * plan.shard_size)
        self.weights = None if places.weights_in_slot else torch.zeros(plan.size, dtype=dtype, device=device)
        self.gradients = None if places.gradients_in_slot else torch.zeros(plan.size, dtype=wide, device=device)
        self.moments: tuple[Tensor, Tensor] | None = None
        self.partial: Tensor | None = None
        self.source: Tensor | None = None
        if places.optimizer_on_host:
            assert host is not None, "states in host memory need its arena"
            self.master, *moments = (host.take(plan.shard_size, wide) for _ in range(3))
            self.moments = moments[0], moments[1]
            self.gradient_shard = host.take(plan.shard_size, wide) if ring is None else ring[: plan.shard_size]
            if places.gradients_in_slot and rules.keeps_partial:
                self.partial = self.gradient_shard if plan.num_shards == 1 else host.take(plan.size, wide)
            if places.weights_in_slot:
                is_copy = rules.weight_copy and dtype != wide
                self.source = host.take(plan.shard_size, dtype) if is_copy else self.master
        else:
            self._on_device(dtype, wide)
        self.squared_norm: Tensor | None = None
        self.pending: Work | None = None
        self.reduced: Tensor | None = None

    def _on_device(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        shard, device = self.plan.shard_size, self.device
        # Weights that are as wide as their gradients are their own master copy.
        if dtype == wide and self.weights is not None:
            self.master = self.weights[self.mine]
        else:
            self.master = torch.zeros(shard, dtype=wide, device=device)
        if self.gradients is not None:
            self.gradient_shard = self.gradients[self.mine]
        else:
            self.gradient_shard = torch.zeros(shard, dtype=wide, device=device)
        if self.weights is None:
            self.source = self.master if dtype == wide else torch.zeros(shard, dtype=dtype, device=device)

    @property
    def weight_shard(self) -> Tensor | None:
        """This rank's part of the resident weights."""
        return None if self.weights is None else self.weights[self.mine]

    @property
    def has_own_master(self) -> bool:
        """Whether the master is memory of its own, not the weights."""
        shard = self.weight_shard
        return shard is None or shard.data_ptr() != self.master.data_ptr()

    def refresh_source(self) -> None:
        """After masters changed: what weight slots are filled from."""
        if self.source is not None and self.source is not self.master:
            self.source.copy_(self.master)

    def view(self, slot: Slot, flat: Tensor) -> Tensor:
        """One parameter in a flat tensor of the bucket's size."""
        return flat[slot.offset : slot.offset + slot.numel].view(slot.shape)


@dataclass(frozen=True)
class Unit:
    """Parameters that come and go together.

    Attributes:
        layer: position among the rank's layers; None for an end of the model.
    """

    layer: int | None
    places: LayerPlaces
    buckets: tuple[Bucket, ...]

    @property
    def is_driven(self) -> bool:
        """Whether its gradients are reduced and moved layer by layer (memo.executor.states)."""
        return self.layer is not None and self.places.is_driven

    @property
    def size(self) -> int:
        """Elements of all buckets, with padding."""
        return sum(bucket.plan.size for bucket in self.buckets)

    @property
    def shard_size(self) -> int:
        return sum(bucket.plan.shard_size for bucket in self.buckets)

    def parts(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor, bucket by bucket."""
        sizes = [bucket.plan.size for bucket in self.buckets]
        return list(flat[: sum(sizes)].split(sizes))

    def shard_parts(self, flat: Tensor) -> list[Tensor]:
        """A flat tensor of this rank's shards, bucket by bucket."""
        sizes = [bucket.plan.shard_size for bucket in self.buckets]
        return list(flat[: sum(sizes)].split(sizes))


@dataclass(frozen=True)
class HostRules:
    """What layers in host memory keep there beside masters and moments.

    Attributes:
        weight_copy: streamed weights in the dtype of training.
        keeps_partial: whole gradients between two microbatches.
        consumes: each gradient is used up as it arrives (memo.train.optimizer): two records serve all layers.
    """

    weight_copy: bool = True
    keeps_partial: bool = False
    consumes: bool = False


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of gradients, masters and moments."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """One NaN: expanded to its shape, what a parameter shows while it has no memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device)


def aligned_bytes(num_bytes: int) -> int:
    return -(-num_bytes // _HOST_ALIGNMENT) * _HOST_ALIGNMENT

"""The states of one layer, of the embedding or of the head, and the memory in which this rank keeps them.

    kind        holds                                          in
    resident    weights, gradients, masters (shard)            the device
    host        masters, reduced gradient, moments (shard)     host memory; with a copy of weights that stream
    slot        weights or gradients, while the layer runs     a rounding buffer of memo.executor.states

`memo.spec.placement` decides which kind a layer has, and `memo.spec.buckets` where each parameter lies in the flat
buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed import Work

from memo.config import TrainingConfig
from memo.config.model import Quantization
from memo.parallel.quantized import CodedBucket
from memo.parallel.shards import Shard
from memo.spec.buckets import BucketPlan, Segment
from memo.spec.moments import moment_bytes
from memo.spec.placement import LayerPlaces
from memo_kernels import wide_dtype

_HOST_ALIGNMENT_BYTES = 64


class HostMemory(Protocol):
    """One arena of host memory (memo.executor.host_pool)."""

    def record(self, index: int) -> Tensor:
        """The whole arena, uint8, for index 0."""


class Carver:
    """Allocates flat tensors from the host arena, one after the other; they are freed only with the arena."""

    def __init__(self, arena: Tensor) -> None:
        self._arena, self._used = arena, 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a 1-D tensor of zeros."""
        num_bytes = numel * dtype.itemsize
        part = self._arena[self._used : self._used + num_bytes].view(dtype)
        self._used += aligned_bytes(num_bytes)
        return part.zero_()


class Bucket:
    """The memory of one bucket on one rank.

    Attributes:
        weights, gradients: flat tensors of the whole bucket on the device; None if they exist only in slots.
        master, gradient_shard: this rank's shard as the optimizer sees it, on the device or in host memory, where it
            is updated. If weights are frozen, the master is this rank's shard of them, and the gradient shard is empty.
        has_own_master: whether the master has memory of its own, rather than sharing that of the weights.
        moments: the first and second moment of the shard, in the host arena; None if the optimizer allocates them.
        ring_record: index of the record in host memory that the gradient shard shares, in turn, with other layers;
            None: it has memory of its own.
        source: this rank's shard of the weights, from which a weight slot is filled; None if weights are resident.
        partial: host memory for the sum of the whole bucket's gradient between two microbatches.
        squared_norm: squared norm of the reduced gradient, fp64, computed before the gradient leaves the device; None
            if it stays there.
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
        ring: tuple[int, Tensor] | None = None,
    ) -> None:
        """`ring`: index of a record shared with other layers, and this bucket's part of it; it holds the reduced
        gradient until the CPU has used it."""
        self.plan, self.places, self.device = plan, places, device
        wide = wide_dtype(dtype)
        self.mine = slice(rank * plan.shard_size, (rank + 1) * plan.shard_size)
        self.weights = None if places.weights_in_slot else torch.zeros(plan.size, dtype=dtype, device=device)
        self.gradients: Tensor | None = None
        if not places.gradients_in_slot and not plan.frozen:
            self.gradients = torch.zeros(plan.size, dtype=wide, device=device)
        self.has_own_master = True
        self.ring_record = None if ring is None else ring[0]
        self.moments: tuple[Tensor, Tensor] | None = None
        self.partial: Tensor | None = None
        self.source: Tensor | None = None
        if plan.frozen:
            self._frozen(dtype, host)
        elif places.optimizer_on_host:
            assert host is not None, "states in host memory need its arena"
            sizes = host_sizes(plan, places, rules, dtype, in_ring=ring is not None)
            own = {name: host.take(*size) for name, size in sizes.items()}
            self.master, self.moments = own["master"], (own["exp_avg"], own["exp_avg_sq"])
            self.gradient_shard = own["gradient"] if ring is None else ring[1]
            if places.gradients_in_slot and rules.keeps_partial:
                self.partial = own.get("partial", self.gradient_shard)
            if places.weights_in_slot:
                self.source = own.get("source", self.master)
        else:
            self._on_device(dtype, wide)
        self.squared_norm: Tensor | None = None
        self.pending: Work | None = None
        self.reduced: Tensor | None = None

    def _frozen(self, dtype: torch.dtype, host: Carver | None) -> None:
        self.gradient_shard, self.has_own_master = torch.empty(0, device=self.device), self.weights is None
        if self.weights is not None:
            self.master = self.weights[self.mine]
        elif self.places.optimizer_on_host:
            assert host is not None, "states in host memory need its arena"
            self.master = self.source = host.take(self.plan.shard_size, dtype)
        else:
            self.master = self.source = torch.zeros(self.plan.shard_size, dtype=dtype, device=self.device)

    def _on_device(self, dtype: torch.dtype, wide: torch.dtype) -> None:
        shard, device = self.plan.shard_size, self.device
        # Weights that are as wide as their gradients need no master copy.
        if dtype == wide and self.weights is not None:
            self.master, self.has_own_master = self.weights[self.mine], False
        else:
            self.master = torch.zeros(shard, dtype=wide, device=device)
        if self.gradients is not None:
            self.gradient_shard = self.gradients[self.mine]
        else:
            self.gradient_shard = torch.zeros(shard, dtype=wide, device=device)
        if self.weights is None:
            self.source = self.master if dtype == wide else torch.zeros(shard, dtype=dtype, device=device)

    def refresh_source(self) -> None:
        """Cast changed masters to the copy from which weight slots are filled, if there is such a copy."""
        if self.source is not None and self.source is not self.master:
            self.source.copy_(self.master)


@dataclass(frozen=True)
class Unit:
    """Parameters whose states are moved together: those of a layer, the embedding or the head.

    Attributes:
        layer: position among the rank's layers; None for the embedding and the head.
        coded: buckets of quantized weights; these never move, wherever `places` puts the buckets.
    """

    layer: int | None
    places: LayerPlaces
    buckets: tuple[Bucket, ...]
    coded: tuple[CodedBucket, ...] = ()

    @property
    def is_driven(self) -> bool:
        """Whether memo.executor.states reduces the gradients when the layer's backward ends, not bucket by bucket."""
        return self.layer is not None and self.places.is_driven

    @cached_property
    def trained_buckets(self) -> tuple[Bucket, ...]:
        """The buckets that have gradients."""
        return tuple(bucket for bucket in self.buckets if not bucket.plan.frozen)

    @property
    def ring_record(self) -> int | None:
        """The ring record of its trained buckets, which all have the same."""
        return self.trained_buckets[0].ring_record if self.trained_buckets else None


def size_of(buckets: Sequence[Bucket | CodedBucket]) -> int:
    """Elements of these buckets, padding included."""
    return sum(bucket.plan.size for bucket in buckets)


def shard_size_of(buckets: Sequence[Bucket]) -> int:
    return sum(bucket.plan.shard_size for bucket in buckets)


def parts_of(buckets: Sequence[Bucket | CodedBucket], flat: Tensor, *, shards: bool = False) -> list[Tensor]:
    """Split a flat tensor, which may be longer, into one part for each bucket or, `shards`, for each bucket's shard."""
    sizes = [bucket.plan.shard_size if shards else bucket.plan.size for bucket in buckets]
    return list(flat[: sum(sizes)].split(sizes))


@dataclass(frozen=True)
class HostRules:
    """The tensors that a layer whose optimizer is in host memory keeps there, besides masters.

    Attributes:
        moments: dtypes of exp_avg and exp_avg_sq, on the device and in host memory.
        weight_copy: weights that stream have a copy in the dtype of training, instead of being cast from the masters.
        keeps_partial: the sum of the whole gradient goes to host memory between two microbatches.
        consumes: memo.train.optimizer uses each gradient as soon as it arrives, so two records serve all layers.
        quantize: the format of quantized weights, on the device and in host memory.
    """

    moments: tuple[torch.dtype, torch.dtype]
    weight_copy: bool = True
    keeps_partial: bool = False
    consumes: bool = False
    quantize: Quantization = "none"


def moment_dtypes(training: TrainingConfig, dtype: torch.dtype) -> tuple[torch.dtype, torch.dtype]:
    """Return the dtypes of exp_avg and exp_avg_sq for weights of `dtype`."""
    wide = wide_dtype(dtype)
    first, second = (
        wide if size == wide.itemsize else torch.bfloat16 for size in moment_bytes(training, wide.itemsize)
    )
    return first, second


def host_sizes(
    plan: BucketPlan, places: LayerPlaces, rules: HostRules, dtype: torch.dtype, *, in_ring: bool
) -> dict[str, tuple[int, torch.dtype]]:
    """Elements and dtype of each tensor of a bucket in the host arena, in their order there, by name.

    `in_ring`: the reduced gradient lies in a record that layers share in turn.
    """
    if not places.optimizer_on_host or plan.coded:
        return {}
    if plan.frozen:
        return {"source": (plan.shard_size, dtype)} if places.weights_in_slot else {}
    wide = wide_dtype(dtype)
    dtypes = {"master": wide, "exp_avg": rules.moments[0], "exp_avg_sq": rules.moments[1]}
    dtypes |= {} if in_ring else {"gradient": wide}
    sizes = {name: (plan.shard_size, dtype_of) for name, dtype_of in dtypes.items()}
    if places.gradients_in_slot and rules.keeps_partial and plan.num_shards > 1:
        sizes["partial"] = plan.size, wide
    if places.weights_in_slot and rules.weight_copy and dtype != wide:
        sizes["source"] = plan.shard_size, dtype
    return sizes


def nothing(dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a scalar NaN. Expanded to a parameter's shape, it is the value of a parameter that has no memory."""
    return torch.full((), float("nan"), dtype=dtype, device=device)


def aligned_bytes(num_bytes: int) -> int:
    """Round up to the alignment of tensors in the host arena."""
    return -(-num_bytes // _HOST_ALIGNMENT_BYTES) * _HOST_ALIGNMENT_BYTES


@dataclass
class MasterSegment:
    """The part of one parameter that lies in this rank's shard, as the optimizer sees it.

    Attributes:
        segment: the range of the flattened local parameter.
        shard: the description of the local parameter.
        weight: the master values, 1-D; a leaf of autograd whose .grad is the reduced gradient.
        moments: the 1-D tensors that must hold the first and the second moment; None: the optimizer allocates them.
    """

    segment: Segment
    shard: Shard
    weight: nn.Parameter
    moments: tuple[Tensor, Tensor] | None = None


class StateMover(Protocol):
    """Copies states between device and host while the device computes (memo.executor.states)."""

    def finish_gradients(self) -> None:
        """Wait for the last reduction that was started, and issue the copy of its result."""

    def offload_gradient(self, bucket: Bucket, reduced: Tensor) -> None:
        """Issue the copy of a reduced gradient from the device to the bucket's gradient shard in host memory."""

    def upload_weights(self, bucket: Bucket) -> None:
        """Issue the copy of the masters in host memory to this rank's shard of the resident weights."""

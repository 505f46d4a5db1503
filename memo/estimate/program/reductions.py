"""What the reduction of gradients, their norm and the publishing of weights take in a step, beside states and slots.

Layers whose states are in slots or in host memory are driven (memo.executor.states): their gradients are reduced layer
by layer, while the next operation runs. All others are reduced bucket by bucket, as memo.parallel.data does it.
"""

from memo.config import RunConfig
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.states import Bucket, States

NORM_CHUNK = 1 << 20
"""Gradients of a shard that are widened to fp64 at a time when their squares are summed (memo_kernels.squared_norm)."""


class Reductions:
    """Of one step. Modules are numbered by owner, as in memo.estimate.program.states; a chunk has `layers` layers."""

    def __init__(self, ledger: Ledger, config: RunConfig, z: LayerSizes, states: States, layers: int) -> None:
        self._ledger, self._z, self._states, self._layers = ledger, z, states, layers
        self._reduces_each = config.parallel.shards_gradients
        self._overlaps = config.parallel.overlap_grad_reduce
        self._whole = [bucket for bucket in states.buckets if not self._is_driven(bucket.owner)]
        self._reducing: list[Block] = []  # of each bucket in `_whole` its shard and what gloo holds
        self._num_reduced = 0
        self._pending: list[Block] = []  # what gloo holds of the driven layer whose gradients are under way
        self._pending_owner: int | None = None
        self._pending_squares: tuple[str, int] | None = None

    # Around the operations of a layer.

    def before_backward(self, owner: int) -> None:
        """If the layer takes the slot of its own gradients that are under way, their reduction ends first."""
        if owner == self._pending_owner and self._states.places[owner].gradients_in_slot:
            self._finish_pending()

    def after_forward(self) -> None:
        self._finish_pending()

    def after_backward(self, owner: int, is_last_microbatch: bool) -> None:
        """Of a module: a driven layer's gradients start now, and all others that are complete.

        ZeRO-2/3 reduce each microbatch's gradients, ZeRO-1 the sum of all; the next operation hides the messages.
        """
        if self._is_layer(owner):
            self._finish_pending()
        if self._is_driven(owner) and (self._reduces_each or is_last_microbatch):
            self._start_pending(owner, is_last_microbatch)
        if is_last_microbatch and self._overlaps:
            self._start_complete(owner)

    def finish(self) -> None:
        """After the last operation: what is left to reduce, the norm, and the updated weights."""
        self._finish_pending()
        self._ledger.at = "reduction"
        self._start_complete(0)
        for index, bucket in enumerate(self._whole):
            if self._states.num_shards > 1:
                self._ledger.free(*self._reducing[2 * index : 2 * index + 2])
            if self._states.places[bucket.owner].optimizer_on_host:
                self._ledger.pulse(self._squares(bucket))
        self._norm()
        self._publish()

    # Driven layers.

    def _is_layer(self, owner: int) -> bool:
        return 1 <= owner % (self._layers + 2) <= self._layers

    def _is_driven(self, owner: int) -> bool:
        return self._is_layer(owner) and self._states.places[owner].is_driven

    def _start_pending(self, owner: int, is_last_microbatch: bool) -> None:
        states, buckets = self._states, [bucket for bucket in self._states.buckets if bucket.owner == owner]
        self._ledger.at = "reduction"
        self._pending_owner = owner
        if states.num_shards > 1:
            self._pending = [self._ledger.make("gloo", bucket.size * self._z.wide) for bucket in buckets]
        if states.places[owner].optimizer_on_host and is_last_microbatch:
            self._pending_squares = max(map(self._squares, buckets))
        if states.num_shards == 1:  # no message that an operation could hide
            self._finish_pending()

    def _finish_pending(self) -> None:
        """The squares of what leaves the device are summed while gloo still holds what it reduced."""
        if self._pending_squares is not None:
            self._ledger.at = "reduction"
            self._ledger.pulse(self._pending_squares)
        self._ledger.free(*self._pending)
        self._pending, self._pending_owner, self._pending_squares = [], None, None

    # All others.

    def _start_complete(self, owner: int) -> None:
        """Start what is complete once the backward of module `owner` is done, in the order of the buckets."""
        shards = self._states.num_shards
        while self._num_reduced < len(self._whole) and self._whole[self._num_reduced].owner >= owner:
            size = self._whole[self._num_reduced].size * self._z.wide
            self._num_reduced += 1
            if shards > 1:
                self._reducing.append(self._ledger.make("reduced gradients", size // shards))
                self._reducing.append(self._ledger.make("gloo", size))

    def _norm(self) -> None:
        """Of what is updated on the device; the squares of all else were summed before it left."""
        self._ledger.at = "gradient norm"
        here = [bucket for bucket in self._states.buckets if not self._states.places[bucket.owner].optimizer_on_host]
        if here:
            self._ledger.pulse(self._squares(max(here, key=lambda bucket: bucket.size)))

    def _squares(self, bucket: Bucket) -> tuple[str, int]:
        """A chunk of a shard in fp64; fp64 needs no copy of itself."""
        elements = min(NORM_CHUNK, bucket.size // self._states.num_shards)
        return "squares", 0 if self._z.wide == 8 else 8 * elements

    def _publish(self) -> None:
        """Updated weights, bucket by bucket: each rank gives a copy of its shard, gloo gathers into one of its own."""
        self._ledger.at = "weights"
        states = self._states
        whole = [bucket.size for bucket in states.buckets if not states.places[bucket.owner].weights_in_slot]
        if states.num_shards > 1 and whole:
            largest = max(whole) * self._z.narrow
            self._ledger.pulse(("weights to send", largest // states.num_shards), ("gloo", largest))

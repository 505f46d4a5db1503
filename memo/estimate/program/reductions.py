"""What reducing gradients, computing their norm and publishing weights take in a step besides states and slots.

Layers whose states are in slots or in host memory are driven (memo.executor.states): their gradients are reduced layer
by layer, while the next operation runs. All others are reduced bucket by bucket, as memo.parallel.data does it.
"""

from memo.config import RunConfig
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.state_layout import OwnedBucket, StateLayout

NORM_CHUNK = 1 << 20
"""Gradients that are cast to fp64 at a time when their squares are summed (memo_kernels.squared_norm)."""


class Reductions:
    """The reductions of one step, in a chunk of `layers` layers; modules are numbered as in
    memo.estimate.program.state_layout."""

    def __init__(self, ledger: Ledger, config: RunConfig, z: LayerSizes, layout: StateLayout, layers: int) -> None:
        self._ledger, self._z, self._layout, self._layers = ledger, z, layout, layers
        self._reduces_each = config.parallel.shards_gradients
        self._overlaps = config.parallel.overlap_grad_reduce
        self._buckets = [bucket for bucket in layout.buckets if not bucket.plan.frozen]
        self._driven = {owner for owner, its in layout.places.items() if self._is_layer(owner) and its.is_driven}
        self._whole = [bucket for bucket in self._buckets if bucket.owner not in self._driven]
        self._of_driven: dict[int, list[OwnedBucket]] = {owner: [] for owner in self._driven}
        for bucket in self._buckets if self._driven else ():
            if bucket.owner in self._driven:
                self._of_driven[bucket.owner].append(bucket)
        self._reducing: list[Block] = []  # for each bucket in `_whole` its shard and gloo's copy
        self._num_reduced = 0
        self._pending: list[Block] = []  # gloo's copies for the driven layer whose gradients are being reduced
        self._pending_owner: int | None = None
        self._pending_squares: tuple[str, int] | None = None

    # Called before and after the operations of a layer.

    def before_backward(self, owner: int) -> None:
        """If the layer needs the slot in which its own gradients are still being reduced, that must end first."""
        if owner == self._pending_owner and self._layout.places[owner].gradients_in_slot:
            self._finish_pending()

    def after_forward(self) -> None:
        self._finish_pending()

    def after_backward(self, owner: int, is_last_microbatch: bool) -> bool:
        """Start to reduce the gradients of a driven layer, or all others that are complete.

        ZeRO-2 and 3 reduce the gradients of each microbatch, ZeRO-1 their sum; the next operation hides the messages.
        Returns whether reductions of complete gradients have started. They start with the last weight gradient of the
        module, beside the tail of its backward.
        """
        if self._is_layer(owner):
            self._finish_pending()
        if owner in self._driven and (self._reduces_each or is_last_microbatch):
            self._start_pending(owner, is_last_microbatch)
        return is_last_microbatch and self._overlaps and self._start_complete(owner)

    def finish(self) -> None:
        """After the last operation: reduce what is left, compute the norm, and publish the updated weights."""
        self._finish_pending()
        self._ledger.at = "reduction"
        self._start_complete(0)
        for index, bucket in enumerate(self._whole):
            if self._layout.num_shards > 1:
                self._ledger.free(*self._reducing[2 * index : 2 * index + 2])
            if self._layout.places[bucket.owner].optimizer_on_host:
                self._ledger.pulse(self._squares(bucket))
        self._norm()
        self._publish()

    # Driven layers: those whose states are in slots or in host memory.

    def _is_layer(self, owner: int) -> bool:
        return 1 <= owner % (self._layers + 2) <= self._layers

    def _start_pending(self, owner: int, is_last_microbatch: bool) -> None:
        layout, buckets = self._layout, self._of_driven[owner]
        self._ledger.at = "reduction"
        self._pending_owner = owner
        if layout.num_shards > 1:
            self._pending = [self._ledger.make("gloo", bucket.size * self._z.wide) for bucket in buckets]
        if layout.places[owner].optimizer_on_host and is_last_microbatch:
            self._pending_squares = max(map(self._squares, buckets), default=None)
        if layout.num_shards == 1:  # there is no message that an operation could hide
            self._finish_pending()

    def _finish_pending(self) -> None:
        """Wait for the reduction; gradients that leave the device are squared while gloo's copies still live."""
        if self._pending_squares is not None:
            self._ledger.at = "reduction"
            self._ledger.pulse(self._pending_squares)
        self._ledger.free(*self._pending)
        self._pending, self._pending_owner, self._pending_squares = [], None, None

    # All other buckets.

    def _start_complete(self, owner: int) -> bool:
        """Start to reduce the buckets that are complete after the backward of module `owner`, in their order; whether
        there was a message to start."""
        shards, before = self._layout.num_shards, self._num_reduced
        while self._num_reduced < len(self._whole) and self._whole[self._num_reduced].owner >= owner:
            size = self._whole[self._num_reduced].size * self._z.wide
            self._num_reduced += 1
            if shards > 1:
                self._reducing.append(self._ledger.make("reduced gradients", size // shards))
                self._reducing.append(self._ledger.make("gloo", size))
        return shards > 1 and self._num_reduced > before

    def _norm(self) -> None:
        """The norm of gradients that stay on the device; all others were squared before they left it."""
        self._ledger.at = "gradient norm"
        here = [bucket for bucket in self._buckets if not self._layout.places[bucket.owner].optimizer_on_host]
        if here:
            self._ledger.pulse(self._squares(max(here, key=lambda bucket: bucket.size)))

    def _squares(self, bucket: OwnedBucket) -> tuple[str, int]:
        """A part of a shard in fp64; gradients in fp64 need no copy."""
        elements = min(NORM_CHUNK, bucket.size // self._layout.num_shards)
        return "squares", 0 if self._z.wide == 8 else 8 * elements

    def _publish(self) -> None:
        """Gather updated weights bucket by bucket, from a copy of each rank's shard into a buffer of gloo's own."""
        self._ledger.at = "weights"
        layout = self._layout
        whole = [bucket.size for bucket in self._buckets if not layout.places[bucket.owner].weights_in_slot]
        if layout.num_shards > 1 and whole:
            largest = max(whole) * self._z.narrow
            self._ledger.pulse(("weights to send", largest // layout.num_shards), ("gloo", largest))

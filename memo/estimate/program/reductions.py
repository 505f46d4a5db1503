"""Memory of reducing gradients, computing their norm and publishing weights in a step, besides states and slots.

Layers whose states are in slots or in host memory are driven (memo.executor.states): their gradients are reduced layer
by layer, while the next operation runs. All other gradients are reduced bucket by bucket, as in memo.parallel.data.
"""

from collections.abc import Sequence
from typing import NamedTuple

from memo.estimate.program.course import Course
from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.state_memory import StateSizes
from memo.spec.buckets import RankUnits, Unit
from memo.spec.placement import StatePlacement

NORM_CHUNK = 1 << 20
"""Number of gradients cast to fp64 at a time when their squares are summed (memo_kernels.squared_norm)."""


class Reduced(NamedTuple):
    """Bytes for the gradients of one module.

    Attributes:
        shards: this rank's shards of the gradients.
        copies: gloo's copies.
        squares: a part of a shard in fp64.
    """

    shards: int
    copies: int
    squares: int


class Gradients(NamedTuple):
    """Bytes for the reductions and the update that end a step; None for modules that are absent or not trained.

    Attributes:
        layers: reduction of a layer, by kind.
        norm: bytes in fp64 of a part of the largest shard that stays on the device.
        sent, gathered: bytes of this rank's shard of published weights, and of gloo's buffer for them.
    """

    layers: tuple[Reduced | None, ...]
    embedding: Reduced | None
    head: Reduced | None
    norm: int
    sent: int
    gathered: int


def gradients_of(
    units: RankUnits,
    kinds: Sequence[int],
    num_kinds: int,
    ends: Sequence[bool],
    placement: StatePlacement,
    sizes: StateSizes,
) -> Gradients:
    """Return the gradients of the stage with these units and `kinds` of layers; `ends`: (has embedding, has head)."""
    shards, (has_embedding, has_head) = sizes.shards, ends

    def squares(elements: int) -> int:
        """Return the fp64 bytes for a tensor that has `elements` over all shards; fp64 gradients need no copy."""
        return 0 if sizes.wide == 8 else 8 * min(NORM_CHUNK, elements // shards)

    def reduced(unit: Unit) -> Reduced | None:
        whole = unit.size * sizes.wide if shards > 1 else 0
        return Reduced(whole // shards, whole, squares(unit.largest)) if unit.size else None

    stays: tuple[Unit, ...] = (units.layer,)  # units whose weights are not in slots
    updated = stays  # units that are updated on the device
    if placement.streams:
        placed = [(unit, placement.of_layer(position)) for position, unit in enumerate(units.layers)]
        stays = tuple(unit for unit, at in placed if not at.weights_in_slot)
        updated = tuple(unit for unit, at in placed if not at.optimizer_on_host)
    updated += () if placement.ends_on_host else units.ends
    gathered = max((unit.largest for unit in (*stays, *units.ends)), default=0) * sizes.narrow if shards > 1 else 0
    return Gradients(
        tuple(reduced(units.layers[kinds.index(kind)]) if kind in kinds else None for kind in range(num_kinds)),
        reduced(units.ends[0]) if has_embedding else None,
        reduced(units.ends[-1]) if has_head else None,
        squares(max((unit.largest for unit in updated), default=0)),
        gathered // shards,
        gathered,
    )


class Reductions:
    """The reductions of one step; modules are numbered as memo.estimate.program.course does."""

    def __init__(self, ledger: Ledger, course: Course, gradients: Gradients) -> None:
        self._ledger, self._course, self._gradients = ledger, course, gradients
        self._driven: dict[int, Reduced] = {}
        # (owner, gradients, whether updated on the host), in order of completion.
        self._whole: list[tuple[int, Reduced, bool]] = []
        self._published_late: set[int] = set()  # layers whose weights stay on the device, and that the CPU updates
        for owner in range(course.num_modules)[::-1]:
            module = self._of(owner)
            if module is None:
                continue
            places = course.places(owner)
            if course.is_layer(owner) and places.is_driven:
                self._driven[owner] = module
            else:
                self._whole.append((owner, module, places.optimizer_on_host))
            if course.is_layer(owner) and places.optimizer_on_host and not places.weights_in_slot:
                self._published_late.add(owner)
        self._reducing: list[tuple[Block, Block]] = []  # shards and gloo's copies of each module in `_whole`
        self._pending: Block | None = None  # gloo's copies for the driven layer whose gradients are being reduced
        self._pending_owner: int | None = None
        self._pending_squares = 0

    def _of(self, owner: int) -> Reduced | None:
        course, (chunk, within) = self._course, divmod(owner, self._course.layers + 2)
        if course.is_layer(owner):
            return self._gradients.layers[course.kind_of(owner)]
        if within == 0:
            return self._gradients.embedding if chunk == 0 else None
        return self._gradients.head if chunk == course.vpp - 1 else None

    # Called before and after the operations of a layer.

    def before_first_forward(self, owner: int, count: int = 1) -> None:
        """Before the first forward of `count` layers in a step: publish the weights that the CPU has updated."""
        if not self._published_late.isdisjoint(range(owner, owner + count)):
            self._publish()

    def before_backward(self, owner: int) -> None:
        """Finish the reduction of this layer's own gradients if they are still in the slot that its backward needs."""
        if owner == self._pending_owner and self._course.places(owner).gradients_in_slot:
            self._finish_pending()

    def after_forward(self) -> None:
        self._finish_pending()

    def after_backward(self, owner: int, is_last_microbatch: bool) -> bool:
        """Start to reduce the gradients of a driven layer, or the complete gradients of all other modules.

        ZeRO-2 and 3 reduce the gradients of each microbatch, ZeRO-1 their sum; the next operation hides the messages.
        Returns whether bucket reductions have started. They start with the last weight gradient of the module, and
        overlap with the tail of its backward.
        """
        if self._course.is_layer(owner):
            self._finish_pending()
        if owner in self._driven and (self._course.reduces_each or is_last_microbatch):
            self._start_pending(owner, is_last_microbatch)
        return is_last_microbatch and self._course.overlaps and self._start_complete(owner)

    def finish(self) -> None:
        """After the last operation, reduce the remaining gradients, compute the norm, and publish the new weights."""
        ledger = self._ledger
        self._finish_pending()
        ledger.at = "reduction"
        self._start_complete(0)
        for (_, module, on_host), blocks in zip(self._whole, self._reducing, strict=True):
            ledger.free(*blocks)
            if on_host:
                ledger.scratch(("squares", module.squares))
        ledger.at = "gradient norm"
        ledger.scratch(("squares", self._gradients.norm))
        self._publish()

    def _publish(self) -> None:
        self._ledger.at = "weights"
        self._ledger.scratch(("weights to send", self._gradients.sent), ("gloo", self._gradients.gathered))

    # Driven layers, whose states are in slots or in host memory.

    def _start_pending(self, owner: int, is_last_microbatch: bool) -> None:
        module = self._driven[owner]
        self._ledger.at = "reduction"
        self._pending_owner = owner
        if self._course.shards:
            self._pending = self._ledger.make("gloo", module.copies)
        if self._course.places(owner).optimizer_on_host and is_last_microbatch:
            self._pending_squares = module.squares
        if not self._course.shards:  # there is no message that the next operation could hide
            self._finish_pending()

    def _finish_pending(self) -> None:
        """Wait for the reduction; gradients that leave the device are squared while gloo's copies still live."""
        if self._pending_squares:
            self._ledger.at = "reduction"
            self._ledger.scratch(("squares", self._pending_squares))
        self._ledger.free(self._pending)
        self._pending, self._pending_owner, self._pending_squares = None, None, 0

    # All other modules.

    def _start_complete(self, owner: int) -> bool:
        """Start to reduce the buckets that are complete after the backward of module `owner`, in their order.

        Returns whether a message was started.
        """
        before = len(self._reducing)
        while len(self._reducing) < len(self._whole) and self._whole[len(self._reducing)][0] >= owner:
            module = self._whole[len(self._reducing)][1]
            shards = self._ledger.make("reduced gradients", module.shards)
            self._reducing.append((shards, self._ledger.make("gloo", module.copies)))
        return self._course.shards and len(self._reducing) > before

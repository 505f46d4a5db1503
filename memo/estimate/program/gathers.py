"""Weights that are gathered into a slot before their layer runs, and the copies that gloo has meanwhile (on CPUs).

As memo.planner.state_plan decides: each operation begins with fetching those layers that no slot holds of the next ones
that need one. A gather ends when its layer runs.
"""

from collections.abc import Iterable

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.state_layout import StateLayout
from memo.spec.placement import next_in_slots


class Gathers:
    """Keeps gloo's copies in the ledger; `owners` are the layers that the operations of a step run, in order."""

    def __init__(self, ledger: Ledger, z: LayerSizes, layout: StateLayout, owners: Iterable[int]) -> None:
        self._ledger = ledger
        self._sizes: dict[int, list[int]] = {}  # bytes of each bucket that is gathered
        if layout.num_shards > 1 and not z.on_cuda:
            for bucket in layout.buckets:
                if layout.places[bucket.owner].weights_in_slot:
                    self._sizes.setdefault(bucket.owner, []).append(bucket.size * z.narrow)
        self._wanted = iter(next_in_slots([owner for owner in owners if owner in self._sizes]))
        self._in_slots: tuple[int, ...] = ()
        self._under_way: dict[int, list[Block]] = {}

    def begin(self, owner: int) -> None:
        """Begin an operation of a layer: start to gather the layers that come next, and wait for its own weights."""
        if owner not in self._sizes:
            return
        wanted = next(self._wanted)
        assert wanted[0] == owner, (wanted, owner)
        self._ledger.at = "weights"
        for fetched in wanted:
            if fetched not in self._in_slots:
                self._under_way[fetched] = [self._ledger.make("gloo", size) for size in self._sizes[fetched]]
        self._in_slots = wanted
        self._ledger.free(*self._under_way.pop(owner, ()))

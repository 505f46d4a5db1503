"""Weights that are gathered into a slot before their layer runs, and the copies that gloo has meanwhile (on CPUs).

As memo.planner.state_plan decides: the slots hold the next different layers that need one, and each operation begins
with fetching those of them that no slot holds. A gather ends when its layer runs.
"""

from collections.abc import Iterable, Sequence

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.state_layout import StateLayout
from memo.spec.placement import NUM_STATE_SLOTS


class Gathers:
    """Keeps gloo's copies in the ledger; `owners` are the layers that the operations of a step run, in order."""

    def __init__(self, ledger: Ledger, z: LayerSizes, layout: StateLayout, owners: Iterable[int]) -> None:
        self._ledger = ledger
        self._sizes: dict[int, list[int]] = {}  # bytes of each bucket that is gathered
        if layout.num_shards > 1 and not z.on_cuda:
            for bucket in layout.buckets:
                if layout.places[bucket.owner].weights_in_slot:
                    self._sizes.setdefault(bucket.owner, []).append(bucket.size * z.narrow)
        self._wanted = iter(_next_owners([owner for owner in owners if owner in self._sizes]))
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


def _next_owners(owners: Sequence[int]) -> list[tuple[int, ...]]:
    """For each operation the owners that are needed next, itself first, as many different ones as there are slots."""
    found: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for owner in reversed(owners):
        following = (owner, *(other for other in following if other != owner))[:NUM_STATE_SLOTS]
        found.append(following)
    return found[::-1]

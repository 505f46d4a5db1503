"""Weights that are gathered into a slot ahead of their layer, and what gloo holds of them meanwhile (on CPUs).

As memo.planner.state_plan decides it: the slots hold the next different layers that need one, and an operation begins
by fetching those of them that no slot holds. A gather ends when its layer runs.
"""

from collections.abc import Iterable, Sequence

from memo.estimate.program.ledger import Block, Ledger
from memo.estimate.program.sizes import LayerSizes
from memo.estimate.program.states import States
from memo.spec.placement import NUM_STATE_SLOTS


class Gathers:
    """Holds the copies of gloo in the ledger; `owners`: whose layer each operation of a step runs, in order."""

    def __init__(self, ledger: Ledger, z: LayerSizes, states: States, owners: Iterable[int]) -> None:
        self._ledger = ledger
        self._sizes: dict[int, list[int]] = {}  # of the buckets that are gathered
        if states.num_shards > 1 and not z.on_cuda:
            for bucket in states.buckets:
                if states.places[bucket.owner].weights_in_slot:
                    self._sizes.setdefault(bucket.owner, []).append(bucket.size * z.narrow)
        self._wanted = iter(_next_owners([owner for owner in owners if owner in self._sizes]))
        self._in_slots: tuple[int, ...] = ()
        self._under_way: dict[int, list[Block]] = {}

    def begin(self, owner: int) -> None:
        """An operation of a layer begins: it fetches others ahead, and waits for its own weights."""
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
    """For each operation the next different owners from it on, as many as there are slots."""
    found: list[tuple[int, ...]] = []
    following: tuple[int, ...] = ()
    for owner in reversed(owners):
        following = (owner, *(other for other in following if other != owner))[:NUM_STATE_SLOTS]
        found.append(following)
    return found[::-1]

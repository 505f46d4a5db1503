"""Weights that are gathered into a slot ahead of their layer, and what gloo holds of them meanwhile (on CPUs).

As memo.planner.state_plan decides it: the slots hold the next different layers that need one, and an operation begins
by fetching those of them that no slot holds. A gather ends when its layer runs.
"""

from collections.abc import Mapping, Sequence

from memo.estimate.program.ledger import Block, Ledger
from memo.spec.placement import NUM_STATE_SLOTS


class Gathers:
    """Holds the copies of gloo in the ledger.

    Args:
        owners: whose weights are in a slot, of each operation in order.
        sizes: bytes of the buckets of each of them, by owner.
    """

    def __init__(self, ledger: Ledger, owners: Sequence[int], sizes: Mapping[int, Sequence[int]]) -> None:
        self._ledger, self._owners, self._sizes = ledger, owners, sizes
        self._wanted = _next_owners(owners)
        self._position = 0
        self._in_slots: tuple[int, ...] = ()
        self._under_way: dict[int, list[Block]] = {}

    def begin(self, owner: int) -> None:
        """An operation of a layer begins: it fetches others ahead, and waits for its own weights."""
        if owner not in self._sizes:
            return
        assert owner == self._owners[self._position], (owner, self._position)
        wanted = self._wanted[self._position]
        self._position += 1
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

"""Weights that are gathered into a slot before their layer runs, and gloo's copies during the gather (on CPUs).

The order follows memo.planner.state_plan: each operation first fetches the next layers that need a slot and are in no
slot yet. A gather ends when its layer runs.
"""

from collections.abc import Iterable, Mapping

from memo.estimate.program.ledger import Block, Ledger
from memo.spec.placement import next_in_slots


class Gathers:
    """Keeps gloo's copies in the ledger."""

    def __init__(self, ledger: Ledger, sizes: Mapping[int, int], owners: Iterable[int]) -> None:
        """`sizes`: bytes of each layer whose weights are gathered; `owners`: the layers that the operations of a step
        run, in order."""
        self._ledger, self._sizes = ledger, sizes
        self._wanted = iter(next_in_slots([owner for owner in owners if owner in sizes]))
        self._in_slots: tuple[int, ...] = ()
        self._under_way: dict[int, Block] = {}

    def begin(self, owner: int) -> None:
        """Begin an operation of a layer: start to gather the next layers, and wait for this layer's weights."""
        if owner not in self._sizes:
            return
        wanted = next(self._wanted)
        assert wanted[0] == owner, (wanted, owner)
        self._ledger.at = "weights"
        for fetched in wanted:
            if fetched not in self._in_slots:
                self._under_way[fetched] = self._ledger.make("gloo", self._sizes[fetched])
        self._in_slots = wanted
        self._ledger.free(self._under_way.pop(owner, None))

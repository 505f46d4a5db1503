"""Which blocks are alive together, fast enough for 10^5 blocks."""

from functools import cached_property

import numpy as np

from memo.planner.memory.dsa import Instance, Ints

_STRIDE = 64
"""Blocks from one stored live set to the next; 16 and 256 were slower for 20,000 blocks."""


class Overlaps:
    """The blocks that share a column with block i, of an instance whose blocks are sorted by lower.

    The blocks that start after i and before its end are a slice of the order. Blocks that started before and still live
    are few but scattered: the live set is stored for every _STRIDE-th block, and the blocks since then are searched.
    """

    def __init__(self, instance: Instance) -> None:
        self._upper = instance.upper
        self._lower = instance.lower
        self._end = np.searchsorted(instance.lower, instance.upper, side="left")
        self._live = _live_sets(instance)

    def of(self, block: int) -> Ints:
        """Indices of the blocks alive together with `block`, itself included."""
        stored, begin = self._live[block // _STRIDE], block // _STRIDE * _STRIDE
        lower, end = self._lower[block], self._end[block]
        before = stored[self._upper[stored] > lower]
        since = begin + np.flatnonzero(self._upper[begin:end] > lower)
        return np.concatenate((before, since))

    @cached_property
    def num_neighbours(self) -> Ints:
        """[n]: how many blocks are alive together with each, itself not counted."""
        num_started = self._end
        num_ended = np.searchsorted(np.sort(self._upper), self._lower, side="right")
        return num_started - num_ended - 1

    def neighbour_bytes(self, sizes: Ints) -> Ints:
        """[n]: the sizes of the blocks alive together with each and its own, summed."""
        order = np.argsort(self._upper, kind="stable")
        started = np.concatenate(([0], np.cumsum(sizes)))
        ended = np.concatenate(([0], np.cumsum(sizes[order])))
        num_ended = np.searchsorted(self._upper[order], self._lower, side="right")
        return started[self._end] - ended[num_ended]


def _live_sets(instance: Instance) -> list[Ints]:
    """For every _STRIDE-th block, the blocks before it that live when it starts."""
    live = np.empty(0, dtype=np.int64)
    found = []
    for begin in range(0, instance.num_blocks, _STRIDE):
        live = live[instance.upper[live] > instance.lower[begin]]
        found.append(live)
        live = np.concatenate((live, np.arange(begin, min(begin + _STRIDE, instance.num_blocks))))
    return found

"""Fills the lowest place with the block of the highest priority, and searches for good priorities by trial.

Placement after the best-fit heuristic of Sekiyama et al., "Profile-guided memory optimization for deep neural
networks" (arXiv 1804.10001). Their choice, the longest lifetime, is one of several priorities here, and a local
search varies them.
"""

import random
import time
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from memo.planner.memory.dsa import Instance, Ints
from memo.planner.memory.greedy import NO_LIMIT, Found, orders
from memo.planner.memory.overlaps import Overlaps

Priorities = npt.NDArray[np.float64]

MAX_BLOCKS = 2000
"""With more blocks one trial takes longer than all greedy orders together."""

_STALLS_PER_BLOCK = 100
"""Trials in a row without a better one, for each block, after which the search ends."""
_PARENTS = 3
_ALL_SHARE = 0.2
"""Share of trials that change all priorities a little; the others set a few of them at random."""
_STEPS = (0.02, 0.05, 0.1, 0.2)
_FEW = (1, 2, 3, 5, 8, 13)
_SMALLEST = 1e-9
"""Least priority; 0 marks blocks that are placed."""


def fill(instance: Instance, priorities: Priorities, limit: int = NO_LIMIT) -> Ints | None:
    """Offsets in units, or None as soon as the peak must reach `limit`; priorities are above 0.

    address                            The lowest place is columns 2 to 4. It gets the block of the highest
       |-----+        +--+             priority among blocks that live in these columns alone. If there is none,
       |     +--------+  |             the ground of the place rises to the lower one of its walls.
       0--1--2--3--4--5--6-> column
    """
    lower, upper = instance.lower, instance.upper
    rest = instance.loads()  # sizes still to be placed in each column
    ground = np.zeros(instance.num_columns + 2, dtype=np.int64)
    ground[0] = ground[-1] = NO_LIMIT  # walls: column c is ground[c + 1]
    waiting = priorities.copy()  # 0 for blocks that are placed
    offsets = np.zeros(instance.num_blocks, dtype=np.int64)
    num_waiting = instance.num_blocks
    while num_waiting:
        left = int(ground.argmin())
        level = int(ground[left])
        right = left + int((ground[left:] > level).argmax())
        fitting = waiting * ((lower >= left - 1) & (upper < right))
        block = int(fitting.argmax())
        if fitting[block] > 0:
            first, last = int(lower[block]), int(upper[block])
            size = int(instance.sizes[block])
            offsets[block], waiting[block] = level, 0
            num_waiting -= 1
            rest[first:last] -= size
            ground[first + 1 : last + 1] = np.where(rest[first:last] > 0, level + size, NO_LIMIT)
        else:
            level = int(min(ground[left - 1], ground[right]))
            if level + int(rest[left - 1 : right - 1].max()) >= limit:
                return None
            ground[left:right] = level
    return offsets


def search(instance: Instance, overlaps: Overlaps, limit: int, goal: int, end_s: float) -> Iterator[Found]:
    """Placements below `limit` units, each better than the last one.

    Ends when one reaches `goal`, at time.monotonic() `end_s`, or after too many trials in a row without a better one.
    It starts from several orders; a trial changes the priorities of one of the best and replaces it if it is not worse.
    The seed is always the same.
    """
    chance = random.Random(0)
    parents: list[tuple[int, Priorities]] = []
    for order in orders(instance, overlaps).values():
        if time.monotonic() > end_s:
            return
        priorities = np.empty(instance.num_blocks)
        priorities[order] = np.linspace(1, 0, instance.num_blocks, endpoint=False)
        offsets = fill(instance, priorities)
        assert offsets is not None
        parents.append((instance.peak(offsets), priorities))
        if parents[-1][0] < limit:
            limit = parents[-1][0]
            yield Found(offsets, limit, "skyline")
    parents = sorted(parents, key=lambda parent: parent[0])[:_PARENTS]
    stalls = 0
    while limit > goal and stalls < _STALLS_PER_BLOCK * instance.num_blocks and time.monotonic() < end_s:
        index = chance.randrange(len(parents))
        peak, priorities = parents[index]
        child = _changed(priorities, chance)
        offsets = fill(instance, child, peak + 1)
        stalls += 1
        if offsets is None:
            continue
        parents[index] = instance.peak(offsets), child
        if parents[index][0] < limit:
            limit, stalls = parents[index][0], 0
            yield Found(offsets, limit, "skyline search")


def _changed(priorities: Priorities, chance: random.Random) -> Priorities:
    child = priorities.copy()
    if chance.random() < _ALL_SHARE:
        step = chance.choice(_STEPS)
        noise = np.array([chance.gauss(0, step) for _ in range(len(child))])
        return np.maximum(np.abs(child + noise), _SMALLEST)
    for _ in range(chance.choice(_FEW)):
        child[chance.randrange(len(child))] = max(chance.random(), _SMALLEST)
    return child

"""Fills the lowest place with the block of the highest priority, and searches for good priorities by trial.

Placement after the best-fit heuristic of Sekiyama et al., "Profile-guided memory optimization for deep neural
networks" (arXiv 1804.10001). Their choice, the longest lifetime, is one of several orders of priority here, and
simulated annealing varies them.
"""

import math
import random
import time
from collections.abc import Iterator

import numpy as np

from memo.planner.memory.dsa import Instance, Ints
from memo.planner.memory.greedy import NO_LIMIT, Found, orders
from memo.planner.memory.overlaps import Overlaps

MAX_BLOCKS = 2000
"""With more blocks one trial takes longer than all greedy orders together, so only `fills` is worth its time."""
MAX_BLOCKS_FILLED = 50_000
"""With 39,000 blocks one order takes 2.5 s on one core of an AMD EPYC."""

_FIRST_ROUND, _LAST_ROUND = 0.25, 10
"""Trials for each block: in the first rounds, and at most in rounds after one that found nothing better."""
_HEAT = 0.3
"""Temperature at the beginning of a round, in mean sizes times mean lifetimes."""


def fill(instance: Instance, order: Ints) -> Ints:
    """Offsets in units; blocks that come first in `order` have the highest priority.

    address                            The lowest place is columns 2 to 4. It gets the block of the highest
       |-----+        +--+             priority among blocks that live in these columns alone. If there is none,
       |     +--------+  |             the ground of the place rises to the lower one of its walls.
       0--1--2--3--4--5--6-> column
    """
    lower, upper = instance.lower, instance.upper
    rest = instance.loads()  # sizes still to be placed in each column
    ground = np.zeros(instance.num_columns + 2, dtype=np.int64)
    ground[0] = ground[-1] = NO_LIMIT  # walls: column c is ground[c + 1]
    waiting = np.empty(instance.num_blocks, dtype=np.int64)  # priorities; 0 for blocks that are placed
    waiting[order] = np.arange(instance.num_blocks, 0, -1)
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
            ground[left:right] = min(ground[left - 1], ground[right])
    return offsets


def fills(instance: Instance, overlaps: Overlaps, limit: int, goal: int, end_s: float) -> Iterator[Found]:
    """Placements below `limit` units by each order of priority; ends as `search`, or with the last order."""
    placements = (fill(instance, order) for order in orders(instance, overlaps).values())
    return _lower(instance, placements, limit, goal, end_s, "skyline")


def search(instance: Instance, overlaps: Overlaps, limit: int, goal: int, end_s: float) -> Iterator[Found]:
    """Placements below `limit` units, each better than the last one, from rounds that begin with different orders.

    Every further round from an order is twice as long: of two orders one often needs few trials where the other needs
    many. Ends when a peak reaches `goal`, at time.monotonic() `end_s`, or when long rounds have found nothing better.
    The seed is always the same.
    """
    chance = random.Random(0)
    starts = orders(instance, overlaps).values()
    num_trials, before = math.ceil(_FIRST_ROUND * instance.num_blocks), NO_LIMIT
    while limit < before or num_trials <= _LAST_ROUND * instance.num_blocks:
        before = limit
        for start in starts:
            trials = _anneal(instance, start, goal, num_trials, chance)
            for found in _lower(instance, trials, limit, goal, end_s, "skyline search"):
                limit = found.peak
                yield found
            if limit <= goal or time.monotonic() > end_s:
                return
        num_trials *= 2


def _lower(
    instance: Instance, placements: Iterator[Ints], limit: int, goal: int, end_s: float, solver: str
) -> Iterator[Found]:
    for offsets in placements:
        peak = instance.peak(offsets)
        if peak < limit:
            limit = peak
            yield Found(offsets, limit, solver)
        if limit <= goal or time.monotonic() > end_s:
            return


def _anneal(instance: Instance, order: Ints, goal: int, num_trials: int, chance: random.Random) -> Iterator[Ints]:
    """The placements of one round of simulated annealing, which changes the order of priority.

    A placement is judged by how far blocks reach above the goal, times how long they live. Few changes lower the peak;
    this tells which of two placements with the same peak is nearer to a lower one.
    """
    lifetimes = instance.upper - instance.lower
    heat = _HEAT * float(instance.sizes.mean() * lifetimes.mean())
    least, best, late = math.inf, order, order
    for trial in range(num_trials):
        offsets = fill(instance, order)
        yield offsets
        above = np.minimum(offsets + instance.sizes - goal, instance.sizes).clip(0)
        cost = float(above @ lifetimes)
        if cost - least < heat * (1 - trial / num_trials) * chance.expovariate(1):
            least, best, late = cost, order, np.flatnonzero(above[order])
        order = _changed(best, late, chance)


def _changed(order: Ints, late: Ints, chance: random.Random) -> Ints:
    """Another order: a block is moved to another place, half of the time one of the places `late` to an earlier one."""
    source, target = chance.randrange(len(order)), chance.randrange(len(order))
    if chance.random() < 0.5:
        source = chance.choice(late)
        target = chance.randrange(source + 1)
    return np.insert(np.delete(order, source), target, order[source])

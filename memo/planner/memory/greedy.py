"""Places one block after the other into the gaps between those that are placed already, in several orders."""

import time
from collections.abc import Iterator
from itertools import product
from typing import Literal, NamedTuple

import numpy as np

from memo.planner.memory.dsa import Instance, Ints
from memo.planner.memory.overlaps import Overlaps

Fit = Literal["best", "first"]
FITS: tuple[Fit, ...] = ("best", "first")
NO_LIMIT = 1 << 62


class Found(NamedTuple):
    """Offsets and peak in units, and how they were found."""

    offsets: Ints
    peak: int
    solver: str


def orders(instance: Instance, overlaps: Overlaps) -> dict[str, Ints]:
    """Indices of all blocks, for each order; the orders that meet the bound most often on layers come first.

    Blocks that are large, live long or are alive together with many others are hard to place, so they are first in an
    order; equal ones are in the order of their requests.
    """
    sizes, lifetime = instance.sizes.astype(np.float64), instance.upper - instance.lower
    keys = {
        "neighbour bytes": overlaps.neighbour_bytes(instance.sizes),
        "size": sizes,
        "degree x size": sizes * (overlaps.num_neighbours + 1),
        "area": sizes * lifetime,
        "lifetime": lifetime,
        "degree": overlaps.num_neighbours,
    }
    found = {name: np.argsort(-key, kind="stable") for name, key in keys.items()}
    return {**found, "request": np.arange(instance.num_blocks)}


def place(
    instance: Instance,
    overlaps: Overlaps,
    order: Ints,
    fit: Fit,
    limit: int = NO_LIMIT,
    end_s: float | None = None,
    given: tuple[Ints, Ints] | None = None,
) -> Ints | None:
    """Offsets in units: each block of `order` in the lowest gap that holds it (first), or in the smallest (best).

    `given`: the blocks that are placed already, and their offsets. None as soon as the peak reaches `limit`, or the
    clock (time.monotonic) `end_s`.
    """
    # A block that is not placed yet lies at 0 and has no length, so that it does not affect any gap.
    begins, ends = np.zeros(instance.num_blocks, dtype=np.int64), np.zeros(instance.num_blocks, dtype=np.int64)
    if given is not None:
        blocks, begins[blocks] = given
        ends[blocks] = begins[blocks] + instance.sizes[blocks]
    for block, size in zip(order.tolist(), instance.sizes[order].tolist(), strict=True):
        near = overlaps.of(block)
        sorted_near = near[np.argsort(begins[near])]
        free_from = np.maximum.accumulate(ends[sorted_near])
        gaps = begins[sorted_near[1:]] - free_from[:-1]
        fitting = np.flatnonzero(gaps >= size)
        if not len(fitting):
            begin = int(free_from[-1])
        elif fit == "first":
            begin = int(free_from[fitting[0]])
        else:
            begin = int(free_from[fitting[np.argmin(gaps[fitting])]])
        if begin + size >= limit or (end_s is not None and time.monotonic() > end_s):
            return None
        begins[block], ends[block] = begin, begin + size
    return begins


def portfolio(instance: Instance, overlaps: Overlaps, goal: int, end_s: float) -> Iterator[Found]:
    """Placements by every order and both fits, each better than the last, until one reaches `goal` units.

    The first is finished whatever the clock says; no other runs past `end_s`.
    """
    best = NO_LIMIT
    for name, order in orders(instance, overlaps).items():
        for fit in FITS:
            offsets = place(instance, overlaps, order, fit, best, None if best == NO_LIMIT else end_s)
            if offsets is not None:
                best = instance.peak(offsets)
                yield Found(offsets, best, f"greedy ({name}, {fit} fit)")
            if best <= goal:
                return


def around(instance: Instance, overlaps: Overlaps, blocks: Ints, offsets: Ints) -> Ints:
    """Offsets of all blocks, of which `blocks` lie at `offsets` already: the lowest of several orders of the others, or
    the first that reaches no higher than `blocks`."""
    rest = np.ones(instance.num_blocks, dtype=bool)
    rest[blocks] = False
    goal = int((offsets + instance.sizes[blocks]).max())
    found: list[Ints] = []
    for order, fit in product(orders(instance, overlaps).values(), FITS):
        placed = place(instance, overlaps, order[rest[order]], fit, given=(blocks, offsets))
        assert placed is not None, "a placement without a limit ends"
        found.append(placed)
        if instance.peak(placed) <= goal:
            break
    return min(found, key=instance.peak)


def settle(instance: Instance, overlaps: Overlaps, offsets: Ints) -> Ints:
    """Offsets of blocks that are moved down, in the order of their addresses, until each lies on another one or at 0.

    The result is valid even if the given addresses are rounded or wrong, and not higher if they are right.
    """
    ends = np.zeros(instance.num_blocks, dtype=np.int64)
    for block in np.argsort(offsets, kind="stable").tolist():
        ends[block] = ends[overlaps.of(block)].max() + instance.sizes[block]
    return ends - instance.sizes

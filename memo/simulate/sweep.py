"""The additional work of a layer that is swept along the sequence, whose attention is cut into blocks.

Follows `memo.executor.sweep`, `memo.parallel.context_sweep` and `memo.attention.core`. The queries of a tile meet the
keys of the tile in a causal square, and the keys of all tiles before it in rectangles:

    forward     one rectangle; both outputs are merged into a sum in the wide dtype, which is then written to the slot
    backward    rectangles of at most BACKWARD_KEYS_PER_QUERY keys a query; each call's gradients are added to wide
                sums, those of keys and values over all tokens before the tile

So with T tiles the sums of keys and values are read and written T / 2 times: larger tiles cost less.

Over cp each rank has a share of a tile's queries. If ranks exchange heads, the share is all queries of some heads, with
the keys and values of these heads. If ranks gather keys and values, it is some queries of all heads, which meet the
keys of all ranks. Then `memo.simulate.attention` counts the sums within a tile where it counts the gathering of its
keys, and only the rectangles before the tile are counted here.

Elementwise work counts as in `memo.simulate.tile_clock`.
"""

from math import ceil
from typing import NamedTuple

from memo.simulate.cost import Cost
from memo.simulate.kernels import Kernels
from memo.spec.sweep import BACKWARD_KEYS_PER_QUERY

SUM_PASSES = 2.5
"""Passes over a sum in fp32 to add a part in bf16: the part is read, and the sum is read and written."""


class SweptAttention(NamedTuple):
    """Attention of one swept layer on one rank.

    Attributes:
        q: elements of the queries of all tokens: s b a d / (cp tp).
        kv: elements of all keys and values that these queries meet: 2 s b k d / tp if they are gathered, and
            2 s b k d / (cp tp) if heads are exchanged.
        gathered_from: number of ranks whose keys and values are gathered; 1: none are gathered.
    """

    kernels: Kernels
    tiles: int
    q: float
    kv: float
    gathered_from: int = 1
    attends_all: bool = True
    """Whether a tile meets all tokens before it; the tokens of a sliding window are met together with those of the tile
    (_strips of memo.simulate.attention)."""

    @property
    def gathers(self) -> bool:
        return self.gathered_from > 1

    @property
    def forward(self) -> Cost:
        """Cost of merging, of copying keys and values to the store, and of more calls than a whole layer has."""
        kernels, merged = self.kernels, self.tiles - 1 if self.attends_all else 0  # nothing lies before the first tile
        # The sum is zeroed, has two parts added, and is read to be written in the narrow dtype.
        passes = SUM_PASSES if self.gathers else 2 * SUM_PASSES + 2 + kernels.narrow / kernels.wide
        merging_s = kernels.memory_s(merged * self.q / self.tiles * passes * kernels.wide, 4 * merged)
        store_s = kernels.memory_s(2 * self.kv / self.gathered_from * kernels.narrow, 2 * self.tiles)
        return self._calls(self.tiles + merged) + Cost(elementwise=merging_s + store_s)

    @property
    def backward(self) -> Cost:
        """Cost of summing gradients, from zeros to the narrow dtype, and of more calls than a whole layer has."""
        kernels, calls = self.kernels, self._all_rectangles()
        if not self.attends_all:
            return self._calls(self.tiles)
        met = self.kv / self.tiles * (self.tiles * (self.tiles - 1) // 2)  # elements whose gradients the calls return
        if not self.gathers:
            calls, met = calls + self.tiles, met + self.kv
        sums_bytes = SUM_PASSES * kernels.wide * (met + calls * self.q / self.tiles)
        cost = self._calls(calls) + Cost(elementwise=kernels.memory_s(sums_bytes, 3 * calls))
        if self.gathers:
            return cost
        ends_bytes = (2 * kernels.wide + kernels.narrow) * (self.q + self.kv)
        return cost + Cost(elementwise=kernels.memory_s(ends_bytes, 4 * self.tiles + 1))

    def _all_rectangles(self) -> int:
        """Return the rectangles of all tiles, without a loop: a long sequence has millions of tiles.

        `period` more tiles before a tile add a whole number of rectangles."""
        period, added = BACKWARD_KEYS_PER_QUERY, self.gathered_from
        periods, rest = divmod(self.tiles, period)
        first = [self._rectangles(before) for before in range(period)]
        whole = periods * sum(first) + period * added * (periods * (periods - 1) // 2)
        return whole + sum(first[:rest]) + rest * periods * added

    def _rectangles(self, before: int) -> int:
        """Return the rectangles in which a tile's queries meet the keys of `before` tiles."""
        return ceil(before * self.gathered_from / BACKWARD_KEYS_PER_QUERY)

    def _calls(self, number: int) -> Cost:
        """Return the cost of `number` calls beyond the one of a whole layer."""
        return Cost(attention=(number - 1) * self.kernels.kernel_s)

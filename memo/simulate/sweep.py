"""Seconds of what a layer that is swept along the sequence does beside its attention, which is cut into blocks.

Follows `memo.executor.sweep`, `memo.parallel.context_sweep` and `memo.attention.core`. The queries of a tile meet its
own keys in a causal square, and those of all tiles before it in rectangles:

    forward     one rectangle; both outputs are merged into a sum in the wide dtype, which is then written to the slot
    backward    rectangles of at most BACKWARD_KEYS_PER_QUERY keys a query; each call's gradients are added to wide
                sums, those of keys and values over all tokens before the tile

So of T tiles the sums of keys and values are read and written T / 2 times: larger tiles cost less.

Over cp each rank has a share of a tile's queries. Where ranks exchange heads, that is all queries of some heads, and
of keys and values the same heads. Where they gather keys and values, it is some queries of all heads, which meet the
keys of all ranks; what they sum inside of a tile is counted where its keys are gathered (`memo.simulate.attention`), so
that only the rectangles before the tile are left to count here.

Elementwise work counts as in `memo.simulate.tile_clock`.
"""

from dataclasses import dataclass
from math import ceil

from memo.simulate.cost import Cost
from memo.simulate.kernels import Kernels
from memo.spec.sweep import BACKWARD_KEYS_PER_QUERY

SUM_PASSES = 2.5
"""Passes over a sum in fp32 to add a part in bf16: the part is read, and the sum is read and written."""


@dataclass(frozen=True)
class SweptAttention:
    """Of one layer on one rank.

    Attributes:
        q: elements of the queries of all tokens: s b a d / (cp tp).
        kv: elements of the keys and values of all tokens that its queries meet: 2 s b k d / tp where they are
            gathered, and 1 / cp of that where heads are exchanged.
        gathered_from: ranks whose keys and values are gathered; 1: none are.
    """

    kernels: Kernels
    tiles: int
    q: float
    kv: float
    gathered_from: int = 1
    meets_all: bool = True
    """Whether a tile meets all tokens before it; those of a sliding window are met with its own (_strips of
    memo.simulate.attention)."""

    @property
    def gathers(self) -> bool:
        return self.gathered_from > 1

    @property
    def forward(self) -> Cost:
        """Merging, keys and values on their way to the store, and the calls beyond those of a whole layer."""
        kernels, merged = self.kernels, self.tiles - 1 if self.meets_all else 0  # nothing lies before the first tile
        # The sum is zeroed, has two parts added, and is read to be written in the narrow dtype.
        passes = SUM_PASSES if self.gathers else 2 * SUM_PASSES + 2 + kernels.narrow / kernels.wide
        merging_s = kernels.memory_s(merged * self.q / self.tiles * passes * kernels.wide, 4 * merged)
        store_s = kernels.memory_s(2 * self.kv / self.gathered_from * kernels.narrow, 2 * self.tiles)
        return self._calls(self.tiles + merged) + Cost(elementwise=merging_s + store_s)

    @property
    def backward(self) -> Cost:
        """Sums of the gradients, from zeros to the narrow dtype, and the calls beyond those of a whole layer."""
        kernels, calls = self.kernels, self._all_rectangles()
        if not self.meets_all:
            return self._calls(self.tiles)
        met = self.kv / self.tiles * (self.tiles * (self.tiles - 1) // 2)  # of which the calls return gradients
        if not self.gathers:
            calls, met = calls + self.tiles, met + self.kv
        sums_bytes = SUM_PASSES * kernels.wide * (met + calls * self.q / self.tiles)
        cost = self._calls(calls) + Cost(elementwise=kernels.memory_s(sums_bytes, 3 * calls))
        if self.gathers:
            return cost
        ends_bytes = (2 * kernels.wide + kernels.narrow) * (self.q + self.kv)
        return cost + Cost(elementwise=kernels.memory_s(ends_bytes, 4 * self.tiles + 1))

    def _all_rectangles(self) -> int:
        """Of all tiles, of which a long sequence has millions: `period` more before a tile add a whole number."""
        period, added = BACKWARD_KEYS_PER_QUERY, self.gathered_from
        periods, rest = divmod(self.tiles, period)
        first = [self._rectangles(before) for before in range(period)]
        whole = periods * sum(first) + period * added * (periods * (periods - 1) // 2)
        return whole + sum(first[:rest]) + rest * periods * added

    def _rectangles(self, before: int) -> int:
        """In which a tile's queries meet the keys of so many tiles before it."""
        return ceil(before * self.gathered_from / BACKWARD_KEYS_PER_QUERY)

    def _calls(self, number: int) -> Cost:
        """A whole layer has one."""
        return Cost(attention=(number - 1) * self.kernels.kernel_s)

"""Offline dynamic storage allocation as plain data (MEMO paper, section 4.2): blocks, problem, solution, bound."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memo.artifacts.memory_plan import Proof
from memo.errors import PlanError

BlockId = int | str
Ints = npt.NDArray[np.int64]

_END = 1 << 62
"""Limit of times and sums of sizes, which are 64-bit integers."""


class Block(NamedTuple):
    """Memory that is needed from time `lower` until just before time `upper`; times are whole numbers."""

    id: BlockId
    lower: int
    upper: int
    num_bytes: int


@dataclass(frozen=True)
class Problem:
    """Give each block an address such that blocks alive together do not overlap and the peak is low.

    Attributes:
        capacity_bytes: limit of the peak, below which a plan is good enough; None for a peak as low as possible.
        alignment_bytes: alignment of every address; sizes are rounded up to it.
    """

    blocks: tuple[Block, ...]
    capacity_bytes: int | None = None
    alignment_bytes: int = 1

    def __post_init__(self) -> None:
        """Raises PlanError, naming the block, for values that are out of range."""
        if self.capacity_bytes is not None and self.capacity_bytes < 0:
            raise PlanError(f"capacity_bytes is {self.capacity_bytes}: give 0 bytes or more, or none")
        for block in self.blocks:
            if block.num_bytes < 1:
                raise PlanError(f"block {block.id} has {block.num_bytes} bytes: leave it out, or give 1 or more")
            if block.lower >= block.upper:
                raise PlanError(
                    f"block {block.id} lives from {block.lower} to {block.upper}: its upper must be above its lower"
                )
            if block.lower <= -_END or block.upper >= _END:
                raise PlanError(f"block {block.id} lives from {block.lower} to {block.upper}, beyond {_END}: rescale")
        ids = Counter(block.id for block in self.blocks)
        if len(ids) < len(self.blocks):
            raise PlanError(f"two blocks have the id {ids.most_common(1)[0][0]}: give each an id of its own")
        total_bytes = sum(self.aligned_bytes(block) for block in self.blocks)
        if total_bytes >= _END:
            raise PlanError(f"the blocks have {total_bytes} bytes in all, {_END} or more: check their sizes")

    def aligned_bytes(self, block: Block) -> int:
        """The size of the block, rounded up to the alignment."""
        return -(-block.num_bytes // self.alignment_bytes) * self.alignment_bytes


@dataclass(frozen=True)
class Solution:
    """Addresses for all blocks of a problem.

    Attributes:
        offsets: block id -> address, in bytes from the start of the arena.
        peak_bytes: highest end of a block, with its size rounded up to the alignment.
        lower_bound_bytes: a proven bound below which no solution has its peak.
        proof: "optimal" if the peak equals the bound; "feasible" if it does not and no search was cut short; "timed
            out" if it does not and a longer search might find a lower peak or prove a higher bound.
        solver: the solver that found the addresses.
        seconds: {solver: time that it took}; not compared.
    """

    offsets: Mapping[BlockId, int]
    peak_bytes: int
    lower_bound_bytes: int
    proof: Proof
    solver: str
    seconds: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def gap(self) -> float:
        """By how much the peak exceeds the bound: 0.01 is 1 % of the bound."""
        return self.peak_bytes / self.lower_bound_bytes - 1 if self.lower_bound_bytes else 0.0


def columns(lower: Ints, upper: Ints) -> tuple[Ints, Ints, int]:
    """Time compressed to the moments that matter: block i lives in columns lower[i] to upper[i] - 1 of so many.

    A column is a moment at which the live set is as large as possible; a new one begins with the first request after a
    free. Blocks are alive together exactly if they share a column.

        time     0  1  2  3  4  5  6  7
        a        |________|                    column 0: a, b
        b              |________|              column 1: b, c
        c                 |___________|        column 2: c, d
        d                       |_____|
    """
    starts = np.unique(lower)
    ends = np.sort(upper)
    num_ends = np.searchsorted(ends, starts, side="right")  # frees up to each start
    column: Ints = np.cumsum(np.diff(num_ends, prepend=num_ends[:1]) > 0, dtype=np.int64)
    last_start = np.searchsorted(starts, upper, side="left") - 1
    num_columns = int(column[-1]) + 1 if len(column) else 0
    return column[np.searchsorted(starts, lower)], column[last_start] + 1, num_columns


@dataclass(frozen=True)
class Instance:
    """A problem in the form that solvers use: sizes in units, time in columns, blocks sorted by lower.

    The unit is the greatest common divisor of all sizes, because addresses need only be sums of sizes: every block can
    be moved down until it lies on another one or at 0.

    Attributes:
        ids: the id of each block of the arrays.
        sizes, lower, upper: [n], int64.
    """

    ids: tuple[BlockId, ...]
    sizes: Ints
    lower: Ints
    upper: Ints
    num_columns: int
    unit_bytes: int

    @classmethod
    def of(cls, problem: Problem) -> "Instance":
        blocks = sorted(problem.blocks, key=lambda block: block.lower)
        num_bytes = np.array([problem.aligned_bytes(block) for block in blocks], dtype=np.int64)
        lower, upper, num_columns = columns(
            np.array([block.lower for block in blocks], dtype=np.int64),
            np.array([block.upper for block in blocks], dtype=np.int64),
        )
        unit_bytes = int(np.gcd.reduce(num_bytes)) if blocks else problem.alignment_bytes
        return cls(tuple(b.id for b in blocks), num_bytes // unit_bytes, lower, upper, num_columns, unit_bytes)

    @property
    def num_blocks(self) -> int:
        return len(self.ids)

    def loads(self) -> Ints:
        """[num_columns]: the sum of the sizes alive in each column."""
        change = np.zeros(self.num_columns + 1, dtype=np.int64)
        np.add.at(change, self.lower, self.sizes)
        np.subtract.at(change, self.upper, self.sizes)
        return np.cumsum(change)[:-1]

    @cached_property
    def bound(self) -> int:
        """The largest load, which is a lower bound of the peak of every solution."""
        return int(self.loads().max(initial=0))

    def peak(self, offsets: Ints) -> int:
        return int((offsets + self.sizes).max(initial=0))

    def busy(self) -> Ints:
        """Indices of the blocks that are alive while at least half of the largest load is.

        A placement of these that is lower than all others is often that of the whole: the rest has room around them.
        """
        num_busy = np.concatenate(([0], np.cumsum(2 * self.loads() >= self.bound)))
        return np.flatnonzero(num_busy[self.upper] > num_busy[self.lower])

    def part(self, blocks: Ints) -> "Instance":
        """The problem of some of the blocks alone, whose indices are sorted."""
        lower, upper, num_columns = columns(self.lower[blocks], self.upper[blocks])
        ids = tuple(self.ids[block] for block in blocks.tolist())
        return Instance(ids, self.sizes[blocks], lower, upper, num_columns, self.unit_bytes)

    def fingerprint(self) -> tuple[bytes, ...]:
        """A key; instances with the same key have the same solutions, block by block in the order of `ids`."""
        unit = str(self.unit_bytes).encode()
        return unit, self.sizes.tobytes(), self.lower.tobytes(), self.upper.tobytes()

    def num_pairs(self) -> int:
        """Pairs of blocks that are alive together."""
        later_starts = np.searchsorted(self.lower, self.upper, side="left") - np.arange(self.num_blocks) - 1
        return int(later_starts.sum())


def lower_bound_bytes(problem: Problem) -> int:
    """The most bytes that live at once, sizes rounded up to the alignment: no solution has a lower peak.

    address
    4 |     +-----------+
      |     |     c     |         at time 2, a, b and c are alive: 4 bytes, whatever their addresses
    2 |  +--+--+--------+
      |  |  b  |
    1 +--+-----+--+-----+
      |     a     |  d  |
    0 +--+--+--+--+--+--+--> time
      0  1  2  3  4  5  6
    """
    instance = Instance.of(problem)
    return instance.bound * instance.unit_bytes

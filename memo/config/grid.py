"""The rank grid: which coordinates a rank has on the four axes, and which ranks share an axis.

Order as in Megatron, fastest first: tp, cp, dp, pp. Neighbours on tp and cp exchange the most, so
they are the most likely to sit in one node. Pure arithmetic, no torch.
"""

import math
from dataclasses import dataclass

from memo.config.parallel import ParallelConfig

AXES = ("tp", "cp", "dp", "pp")


@dataclass(frozen=True)
class Coordinates:
    """Where one rank stands on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the axes, whose product is the world size, and their order, fastest first."""

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    order: tuple[str, ...] = AXES

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.pp

    def stride(self, axis: str) -> int:
        """How far apart neighbours along `axis` are."""
        return math.prod(getattr(self, faster) for faster in self.order[: self.order.index(axis)])

    def coordinates(self, rank: int) -> Coordinates:
        """Inverse of `rank_at`."""
        position = {}
        for axis in self.order:
            rank, position[axis] = divmod(rank, getattr(self, axis))
        return Coordinates(**position)

    def rank_at(self, coordinates: Coordinates) -> int:
        rank = 0
        for axis in reversed(self.order):
            rank = rank * getattr(self, axis) + getattr(coordinates, axis)
        return rank

    def groups(self, *axes: str) -> list[list[int]]:
        """Every set of ranks that differ only along `axes`, each in rank order."""
        sets: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.world_size):
            position = self.coordinates(rank)
            key = tuple(getattr(position, axis) for axis in AXES if axis not in axes)
            sets.setdefault(key, []).append(rank)
        return list(sets.values())


def rank_grid(parallel: ParallelConfig, world_size: int, order: tuple[str, ...] = AXES) -> RankGrid:
    """The grid of a checked run; memo itself has its ranks in the order of `AXES`."""
    return RankGrid(parallel.tp, parallel.cp, parallel.dp(world_size), parallel.pp, order)

"""The rank grid: pure arithmetic, checked over every small grid."""

import itertools

import pytest

from memo.mesh import AXES, Coordinates, RankGrid

GRIDS = [RankGrid(*sizes) for sizes in itertools.product((1, 2, 3), (1, 2, 4), (1, 2, 3), (1, 2, 5))]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rank_and_coordinates_are_inverse(grid: RankGrid) -> None:
    seen = {grid.coordinates(rank) for rank in range(grid.world_size)}
    assert len(seen) == grid.world_size == grid.tp * grid.cp * grid.dp * grid.pp
    for rank in range(grid.world_size):
        at = grid.coordinates(rank)
        assert all(0 <= getattr(at, axis) < getattr(grid, axis) for axis in AXES)
        assert grid.rank_at(at) == rank


@pytest.mark.parametrize("order", list(itertools.permutations(AXES))[::5], ids=str)
def test_a_grid_in_another_order_has_its_first_axis_on_neighbours(order: tuple[str, ...]) -> None:
    grid = RankGrid(tp=2, cp=3, dp=5, pp=7, order=order)
    assert grid.stride(order[0]) == 1
    for axis in AXES:
        assert grid.groups(axis)[0] == [index * grid.stride(axis) for index in range(getattr(grid, axis))]
        assert grid.rank_at(Coordinates(**{a: int(a == axis) for a in AXES})) == grid.stride(axis)
    assert all(grid.rank_at(grid.coordinates(rank)) == rank for rank in range(grid.world_size))


def test_neighbours_on_tp_are_adjacent_ranks_then_cp_then_dp_then_pp() -> None:
    grid = RankGrid(tp=2, cp=3, dp=5, pp=7)
    strides = [grid.rank_at(Coordinates(**{a: int(a == axis) for a in AXES})) for axis in AXES]
    assert AXES == ("tp", "cp", "dp", "pp")
    assert strides == [1, 2, 6, 30]


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_groups_partition_the_world(grid: RankGrid) -> None:
    for count in range(len(AXES) + 1):
        for axes in itertools.combinations(AXES, count):
            groups = grid.groups(*axes)
            assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
            for group in groups:
                assert group == sorted(group)
                positions = [grid.coordinates(rank) for rank in group]
                for axis in AXES:
                    distinct = {getattr(position, axis) for position in positions}
                    assert len(distinct) == (getattr(grid, axis) if axis in axes else 1)

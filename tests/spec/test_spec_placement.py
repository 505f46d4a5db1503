"""Which layers have what where: shares become counts, counts become layers that lie far from each other."""

import itertools
from typing import Any

import pytest

from memo.config import RunConfig, preset
from memo.spec.placement import LayerPlaces, StatePlacement, count_of, placement_of, spread

LAYERS = 12


def placed(world_size: int = 1, **overrides: Any) -> StatePlacement:
    """12 layers, placed as the flags say."""
    values = {"num_layers": LAYERS, "mock_data": True, "train_iters": 1, "device": "cpu"}
    return placement_of(RunConfig(model=preset("llama-tiny")).override({**values, **overrides}), world_size)


def fractions(*shares: float | None) -> dict[str, Any]:
    names = ("optimizer_offload_fraction", "gradient_offload_fraction", "weight_offload_fraction")
    return {"offload_states": "all", **dict(zip(names, shares, strict=True))}


def chosen(layers: int, count: int) -> list[int]:
    """The layers that go to host memory when `count` do."""
    return [layer for layer, turn in enumerate(spread(layers)) if turn < count]


@pytest.mark.parametrize("layers", [*range(1, 20), 32, 61, 80, 126])
def test_the_first_layers_that_leave_lie_far_from_each_other(layers: int) -> None:
    """Any number of them is nested in the next, and no gap between two is above twice the least plus one."""
    assert sorted(spread(layers)) == list(range(layers))
    for count in range(1, layers + 1):
        places = chosen(layers, count)
        assert len(places) == count
        assert places[-1] == layers - 1, "the last layer goes first: its forward and backward need one copy"
        assert set(chosen(layers, count - 1)) < set(places)
        gaps = [after - before for before, after in itertools.pairwise([-1, *places])][1:]
        assert not gaps or max(gaps) <= 2 * min(gaps) + 1


def test_halves_and_quarters_are_evenly_spaced() -> None:
    assert chosen(8, 1) == [7]
    assert chosen(8, 2) == [3, 7]
    assert chosen(8, 4) == [1, 3, 5, 7]
    assert chosen(12, 3) == [3, 7, 11]


@pytest.mark.parametrize(
    ("share", "count"), [(0.0, 0), (0.01, 1), (0.5, 6), (0.51, 7), (1 / 3, 4), (0.1 + 0.2, 4), (1.0, 12)]
)
def test_shares_are_rounded_up_and_float_noise_is_not(share: float, count: int) -> None:
    assert count_of(share, LAYERS) == count
    assert count_of(0.1 + 0.2, 10) == 3


def test_what_the_flags_ask_for() -> None:
    assert placed() == StatePlacement(LAYERS)
    assert placed(offload_states="optimizer") == StatePlacement(LAYERS, LAYERS)
    assert placed(offload_states="all") == StatePlacement(LAYERS, LAYERS, LAYERS, LAYERS)
    assert placed(**fractions(0.75, 0.5, 0.25)) == StatePlacement(LAYERS, 9, 6, 3)
    assert placed(**fractions(0.5, None, None)) == StatePlacement(LAYERS, 6, 6, 6), "defaults of 1 follow the optimizer"
    optimizer = {**fractions(None, 0.25, None), "offload_states": "optimizer"}
    assert placed(**optimizer) == StatePlacement(LAYERS, LAYERS, 3, 0)
    assert placed(**fractions(0, None, None)) == StatePlacement(LAYERS)
    assert not placed(offload_states="all", offload_weight_copy=False).weight_copy


def test_a_stage_places_its_own_layers() -> None:
    halves = placed(world_size=2, pipeline_model_parallel_size=2, **fractions(0.5, 0.5, 0.0))
    assert halves == StatePlacement(6, 3, 3, 0)


def test_a_layer_with_less_has_what_is_nested() -> None:
    placement = StatePlacement(LAYERS, 9, 6, 3)
    places = [placement.of_layer(position) for position in range(LAYERS)]
    assert sum(p.optimizer_on_host for p in places) == 9
    assert sum(p.gradients_in_slot for p in places) == 6
    assert sum(p.weights_in_slot for p in places) == 3
    assert all(p.optimizer_on_host for p in places if p.gradients_in_slot or p.weights_in_slot)
    assert placement.streams and not StatePlacement(LAYERS).streams


def test_ends_are_updated_on_the_host_with_the_last_layer() -> None:
    assert StatePlacement(LAYERS, LAYERS).of_ends == LayerPlaces(optimizer_on_host=True)
    assert StatePlacement(LAYERS, LAYERS - 1).of_ends == LayerPlaces()
    assert StatePlacement(LAYERS, shards_weights=True, shards_gradients=True).of_ends == LayerPlaces()


SHARDED = {"data_parallel_sharding_strategy": "optim_grads_params"}


@pytest.mark.parametrize(
    ("world_size", "layout", "is_sharded"),
    [
        (1, {}, False),
        (2, {"tensor_model_parallel_size": 2}, False),
        (2, {"pipeline_model_parallel_size": 2}, False),
        (2, {}, True),
        (2, {"context_parallel_size": 2}, True),
    ],
)
def test_sharding_needs_ranks_to_share_with(world_size: int, layout: dict[str, Any], is_sharded: bool) -> None:
    placement = placed(world_size, **SHARDED, **layout)
    assert (placement.shards_gradients, placement.shards_weights, placement.streams) == (is_sharded,) * 3
    assert placement.of_layer(0) == LayerPlaces(False, is_sharded, is_sharded)


def test_sharded_gradients_alone() -> None:
    placement = placed(2, data_parallel_sharding_strategy="optim_grads", **fractions(0.5, 0.0, 0.0))
    assert placement.shards_gradients and not placement.shards_weights
    places = [placement.of_layer(position) for position in range(LAYERS)]
    assert all(p.gradients_in_slot and not p.weights_in_slot for p in places)
    assert sum(p.optimizer_on_host for p in places) == 6

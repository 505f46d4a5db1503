"""Which states go to host memory, together with what activations do: the fastest placement that fits.

From the fewest layers that must go, and from all, layers are exchanged among the kinds (optimizers, gradients, weights;
a copy of the weights or none) in ever smaller steps, as long as that makes the step shorter by
`memo.search.state_costs`; where that ends, and the best that were met, are simulated in full.

Known error: at most 3 % slower than the best of a grid of quarters, in the cases of the tests.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

from memo.config import RunConfig
from memo.errors import ResourceError
from memo.estimate.hardware import Hardware
from memo.estimate.state_memory import accumulates_whole
from memo.search.state_costs import Costs, Room, Way
from memo.simulate.predict import StepPrediction, predict_step
from memo.spec.placement import StatePlacement, with_placement
from memo.units import format_bytes

_CLIMBS = 8
"""Of starts, the most promising ones."""
_BEST = 4
_EXCHANGES = (
    {"optimizer": -1},
    {"gradients": -1},
    {"weights": -1},
    {"optimizer": 1, "weights": -1},
    {"optimizer": 1, "gradients": -1},
    {"optimizer": -1, "weights": 1},
    {"optimizer": -1, "gradients": 1},
    {"gradients": 1, "weights": -1},
    {"gradients": -1, "weights": 1},
)
"""Layers more or less in host memory. More of one alone never makes a step shorter."""


@dataclass(frozen=True)
class Nearest:
    """The placement, as little as can be of the activations on the device, that lacks least.

    Attributes:
        excess: what it needs of the memory that is short, over what there is; 1 or less: it fits.
    """

    excess: float
    placement: StatePlacement
    way: Way


@dataclass(frozen=True)
class Placed:
    """A run with its placement, what its activations move (tiles by group; None: nothing, or as configured), and the
    simulated step."""

    config: RunConfig
    placement: StatePlacement
    moved: Mapping[str, int] | None
    step: StepPrediction


def resolve_states(
    config: RunConfig,
    world_size: int,
    device_bytes: float,
    host_bytes: float,
    hardware: Hardware,
    *,
    local_ranks: int | None = None,
) -> RunConfig:
    """`config` with --offload-states auto replaced by what is fastest and fits; any other configuration as it is.

    Where everything fits on the device, nothing moves.

    Args:
        config: checked, its device resolved.
        device_bytes: what one rank may take of its device, all told: the lesser of what is free and --device-memory-gb.
        host_bytes: what activations and states of one node's ranks may take of host memory.
        local_ranks: ranks of a node; default: as many as the machine has devices.

    Raises ResourceError that names what binds where no placement fits.
    """
    if config.memory.offload_states != "auto":
        return config
    room = Room(device_bytes, host_bytes, local_ranks or min(world_size, hardware.gpus_per_node))
    costs = Costs(config, world_size, hardware, room)
    found = place(costs)
    if found is None:
        raise ResourceError(
            f"--offload-states auto finds no placement that fits: {shortage(costs)}: use a smaller --seq-length or "
            "--model, spread the run over more devices with --tp, --cp and --pp, or allow more with --device-memory-gb "
            "and --offload-host-memory-gb"
        )
    return with_placement(config, found.placement)


def place(costs: Costs) -> Placed | None:
    """The fastest placement; None where nothing fits."""
    if max(costs.excess(costs.none, costs.ways[0])) <= 1:  # everything stays
        return _simulated(costs, costs.none, costs.ways[0])
    ranked = sorted(starts(costs), key=partial(_rank, costs))
    ends = dict.fromkeys(_climb(costs, start) for start in ranked[:_CLIMBS])
    found: Placed | None = None
    best = sorted(costs.seen, key=partial(_rank, costs))[:_BEST]
    for placement in dict.fromkeys([costs.none, *ends, *best]):
        way = costs.best_way(placement)[1]
        if way is None:
            continue
        placed = _simulated(costs, placement, way)
        if found is None or placed.step.step_time_s < found.step.step_time_s:
            found = placed
    return found


def fits(costs: Costs) -> bool:
    """Whether any placement does, whatever its speed."""
    return nearest(costs).excess <= 1


def shortage(costs: Costs) -> str:
    """What binds where nothing fits, by the placement that comes nearest."""
    found = nearest(costs)
    at = found.placement
    device, host = costs.needed(at, found.way)
    of_device, of_host = costs.excess(at, found.way)
    binds = "device memory" if of_device >= of_host else "host memory"
    return (
        f"{binds} binds: with the states of {at.optimizer} of a rank's {at.layers} layers in host memory, a rank needs "
        f"{format_bytes(device)} of its device, which has {format_bytes(costs.room.device_bytes)}, and a node "
        f"{format_bytes(host)} of host memory, which has {format_bytes(costs.room.host_bytes)}"
    )


def nearest(costs: Costs) -> Nearest:
    """Of placements that take least of both sides: with the fewest layers that must go, all of these goes, weights from
    the masters. Only gradients that are added up there whole take host memory of their own, so they also stay."""
    shapes = [_shape(costs, 1, 1, False)]
    if accumulates_whole(costs.none, costs.sizes):
        shapes.append(_shape(costs, 0, 1, False))
    least = [_with_optimizers(shape, _fewest(costs, shape, costs.frugal_ways)) for shape in shapes]
    tried = [Nearest(max(costs.excess(start, way)), start, way) for start in least for way in costs.frugal_ways]
    return min(tried, key=lambda found: (found.excess, sum(costs.excess(found.placement, found.way))))


def starts(costs: Costs) -> list[StatePlacement]:
    """With all, some or none of what may go with a layer's optimizer: the fewest layers that must go, for each way of
    activations that needs little, and all layers. They lie far apart, as the fastest of each kind do."""
    copies = (True, False) if costs.sizes.has_masters else (True,)
    shapes = [_shape(costs, gradients, 0, True) for gradients in (0, 1)]
    shapes += [_shape(costs, gradients, 1, copy) for gradients in (0, 1) for copy in copies]
    counts = {shape: {_fewest(costs, shape, [way]) for way in costs.frugal_ways} for shape in shapes}
    found = [_with_optimizers(shape, count) for shape in shapes for count in {*counts[shape], shape.layers}]
    return list(dict.fromkeys(found))


def _shape(costs: Costs, gradients: int, weights: int, copy: bool) -> StatePlacement:
    """Of one layer in host memory: what goes besides its optimizer."""
    return replace(costs.none, gradients=gradients, weights=weights, weight_copy=copy)


def _with_optimizers(shape: StatePlacement, count: int) -> StatePlacement:
    gradients, weights = count * shape.gradients, count * shape.weights
    return _regular(replace(shape, optimizer=count, gradients=gradients, weights=weights))


def _regular(placement: StatePlacement) -> StatePlacement:
    """No more gradients or weights than optimizers; exactly as many where ZeRO keeps them all in slots anyway."""
    most = placement.optimizer
    return replace(
        placement,
        gradients=most if placement.shards_gradients else min(placement.gradients, most),
        weights=most if placement.shards_weights else min(placement.weights, most),
    )


def _fewest(costs: Costs, shape: StatePlacement, ways: list[Way]) -> int:
    """Layers until some way of activations fits on the device; all of them if none does."""
    low, high = -1, costs.none.layers
    while high - low > 1:
        middle = (low + high) // 2
        placement = _with_optimizers(shape, middle)
        is_enough = any(costs.excess(placement, way)[0] <= 1 for way in ways)
        low, high = (low, middle) if is_enough else (middle, high)
    return high


def _climb(costs: Costs, start: StatePlacement) -> StatePlacement:
    """Where no exchange makes a step shorter, or as short with less that moves."""
    best, step = start, max(1, start.layers // 4)
    while step:
        faster = min(_around(best, step, costs.sizes.has_masters), key=partial(_rank, costs))
        if _rank(costs, faster) < _rank(costs, best):
            best = faster
        else:
            step //= 2
    return best


def _rank(costs: Costs, placement: StatePlacement) -> tuple[float, int]:
    """The faster one, of equally fast ones that which moves less."""
    return costs.best_way(placement)[0], placement.optimizer + placement.gradients + placement.weights


def _around(at: StatePlacement, step: int, has_masters: bool) -> Iterator[StatePlacement]:
    for exchange in _EXCHANGES:
        optimizer, gradients, weights = (
            min(max(0, getattr(at, name) + exchange.get(name, 0) * step), at.layers)
            for name in ("optimizer", "gradients", "weights")
        )
        yield _regular(replace(at, optimizer=optimizer, gradients=gradients, weights=weights))
    if has_masters:
        yield replace(at, weight_copy=not at.weight_copy)


def _simulated(costs: Costs, placement: StatePlacement, way: Way) -> Placed:
    config = with_placement(way.config, placement)
    step = predict_step(config, costs.world_size, costs.hardware, way.moved)
    return Placed(config, placement, way.moved, step)

"""Finds the fastest placement of states that fits, together with the use of activations.

A local search starts from the fewest layers whose states must go to host memory, and from all layers. It changes the
number of layers of each kind (optimizers, gradients, weights; with or without a copy of the weights) in ever smaller
increments, as long as `memo.search.state_costs` estimates a shorter step. The local optima, and the best placements met
on the way, are then simulated in full.

Known error: at most 3 % slower than the best of a grid of quarters, in the cases of the tests.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from math import inf
from typing import NamedTuple

from memo.estimate.state_memory import accumulates_whole
from memo.search.state_costs import ActivationUse, Costs
from memo.simulate.predict import StepPrediction
from memo.spec.placement import StatePlacement, with_placement
from memo.units import format_bytes

_CLIMBS = 8
"""Number of starting points of the local search, the most promising ones."""
_MOST_GAIN = 0.1
"""Share of a step that the search may save on its way from a start; in 1,800 searches none saved more than 5 %."""
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
    {"gradients": -1, "weights": 1, "optimizer": 1},
)
"""Changes of the number of layers in host memory. More layers of a single kind never make a step shorter."""


class Placed(NamedTuple):
    """A placement with a use of activations, and the simulated step."""

    placement: StatePlacement
    use: ActivationUse
    step: StepPrediction


class Contender(NamedTuple):
    """A use of activations, and a lower bound of the seconds of a step with it wherever the states are."""

    least_s: float
    use: ActivationUse


def contenders(costs: Costs, below_s: float = inf) -> list[Contender]:
    """Return the uses of activations that fit in host memory and with which a step may take less than `below_s`."""
    found = []
    for use in costs.uses:
        least_s = costs.least_s(use) if costs.fits_host(costs.none, use) else inf  # states there only add
        if least_s < below_s:
            least_s = costs.least_s(use, with_waits=True)
        if least_s < below_s:
            found.append(Contender(least_s, use))
    return found


def place(costs: Costs, below_s: float = inf, among: Sequence[Contender] | None = None) -> Placed | None:
    """Return the fastest placement; None if none fits, or if a step takes `below_s` or more with all of them.

    A placement is not simulated if its estimate is too long already: in thousands of simulations none took less than
    `Costs.rough_s`.

    Args:
        among: the result of `contenders` for these seconds or more, if it is known.
    """
    if costs.uses[0].moved is None and costs.holds(costs.none, costs.uses[0]):  # everything stays
        return Placed(costs.none, costs.uses[0], costs.uses[0].step)
    among = contenders(costs, below_s) if among is None else among
    uses = [each.use for each in among if _least_s(costs, each, below_s) < below_s and each.use.pipeline_s < below_s]
    if not uses:
        return None
    costs = costs.within(costs.limits, uses)
    ranked = sorted(starts(costs), key=partial(_rank, costs))
    most_s = (1.0 + _MOST_GAIN) * min(below_s, costs.best_use(ranked[0])[0])
    chosen = [start for start in ranked[:_CLIMBS] if costs.best_use(start)[0] < most_s] or ranked[:1]
    ends = dict.fromkeys(_climb(costs, start) for start in chosen)
    fastest: Placed | None = None
    best = sorted(costs.seen, key=partial(_rank, costs))[:_BEST]
    for placement in dict.fromkeys([costs.none, *ends, *best]):
        rough_s, use = costs.best_use(placement)
        if use is None or rough_s >= below_s:
            continue
        step = use.step if placement == costs.none else use.simulate(with_placement(use.config, placement))
        if step.step_time_s < below_s:
            fastest, below_s = Placed(placement, use, step), step.step_time_s
    return fastest


def fits(costs: Costs, given: StatePlacement | None = None) -> bool:
    """Return whether any placement fits, or the given one, whatever its speed."""
    uses = [use for use in costs.frugal_uses if costs.fits_host(given or costs.none, use)]  # states there only add
    return any(costs.holds(start, use) for start, use in product(_least(costs, given, uses), uses))


def shortage(costs: Costs, given: StatePlacement | None = None) -> str:
    """Return a text that says which memory is short, for the placement nearest to fitting or the given one."""
    at, use = nearest(costs, given)
    device, host = costs.needed(at, use)
    limits = costs.limits
    binds = "device memory" if device * limits.host_bytes >= host * limits.device_bytes else "host memory"
    moved = f"with the states of {at.optimizer} of a rank's {at.layers} layers in host memory, " if at.optimizer else ""
    return (
        f"{binds} binds: {moved}a rank needs "
        f"{format_bytes(device)} of its device, which has {format_bytes(limits.device_bytes)}, and a node "
        f"{format_bytes(host)} of host memory, which has {format_bytes(limits.host_bytes)}"
    )


def nearest(costs: Costs, given: StatePlacement | None = None) -> tuple[StatePlacement, ActivationUse]:
    """Return the placement (or the given one) and the use of activations that need least of the scarcer memory."""

    def excess(pair: tuple[StatePlacement, ActivationUse]) -> tuple[float, float]:
        both = costs.excess(*pair)
        return max(both), sum(both)

    return min(product(_least(costs, given, costs.frugal_uses), costs.frugal_uses), key=excess)


def _least(costs: Costs, given: StatePlacement | None, uses: list[ActivationUse]) -> list[StatePlacement]:
    """Return the placements that need least memory relative to the available memory, or the given placement.

    They put all states of the fewest possible layers in host memory, and cast weights from the masters instead of
    keeping a copy. Gradients that are summed whole in host memory take additional space there, so a placement
    that leaves gradients on the device is then tried as well.
    """
    if given is not None:
        return [given]
    shapes = [_shape(costs, 1, 1, False)]
    if accumulates_whole(costs.none, costs.sizes):
        shapes.append(_shape(costs, 0, 1, False))
    return [_with_optimizers(shape, _fewest(costs, [shape], uses)) for shape in shapes]


def _least_s(costs: Costs, contender: Contender, below_s: float) -> float:
    """Return a lower bound of the seconds of a step with a use of activations, under any placement that fits.

    It combines the layers with the CPU's update of the fewest layers that must be in host memory. On a single stage, if
    gradients are clipped, only the forward of the first microbatch hides updates. If the layers alone take `below_s`,
    the placements are not counted.
    """
    least_s, use = contender
    if least_s >= below_s:
        return least_s
    shapes = _shapes(costs)[::-1]  # those that leave most room come first
    count = _fewest(costs, shapes, [use])
    ends = [_with_optimizers(shape, count) for shape in shapes]
    if not any(costs.fits_host(at, use) for at in ends):
        return inf
    cpu_s = min((costs.of(at).cpu_s for at in ends if costs.fits_device(at, use)), default=inf)
    if costs.sizes.clips and costs.config.parallel.pp == 1:  # a forward takes at most half of a microbatch
        least_s += max(0.0, cpu_s - least_s / (2 * costs.num_parts))
    return max(least_s, cpu_s)


def starts(costs: Costs) -> list[StatePlacement]:
    """Return starting points of the local search, which lie far apart.

    Each shape says which states go to host memory with a layer's optimizer (gradients, weights, a copy of the weights).
    For each shape, the starting points have the fewest layers with which the run fits on the device, for each use of
    activations, and all layers.
    """
    shapes = _shapes(costs)
    counts = {shape: {_fewest(costs, [shape], [use]) for use in costs.uses} for shape in shapes}
    found = [_with_optimizers(shape, count) for shape in shapes for count in {*counts[shape], shape.layers}]
    return list(dict.fromkeys(found))


def _shapes(costs: Costs) -> list[StatePlacement]:
    copies = (True, False) if costs.sizes.has_masters else (True,)
    shapes = [_shape(costs, gradients, 0, True) for gradients in (0, 1)]
    return shapes + [_shape(costs, gradients, 1, copy) for gradients in (0, 1) for copy in copies]


def _shape(costs: Costs, gradients: int, weights: int, copy: bool) -> StatePlacement:
    """Return a placement of one layer in host memory; `gradients` and `weights` are 0 or 1: whether they go there."""
    return costs.none._replace(gradients=gradients, weights=weights, weight_copy=copy)


def _with_optimizers(shape: StatePlacement, count: int) -> StatePlacement:
    return _moving(shape, count, count * shape.gradients, count * shape.weights)


def _moving(at: StatePlacement, optimizer: int, gradients: int, weights: int) -> StatePlacement:
    """Limit the layers of gradients and weights to those of optimizers; equal numbers if ZeRO keeps all in slots."""
    return at._replace(
        optimizer=optimizer,
        gradients=optimizer if at.shards_gradients else min(gradients, optimizer),
        weights=optimizer if at.shards_weights else min(weights, optimizer),
    )


def _fewest(costs: Costs, shapes: Sequence[StatePlacement], uses: list[ActivationUse]) -> int:
    """Return the fewest layers in host memory with which some use fits on the device, in some shape; all layers if none
    fits."""

    def is_enough(count: int) -> bool:
        placements = dict.fromkeys(_with_optimizers(shape, count) for shape in shapes)
        return any(costs.fits_device(*pair) for pair in product(placements, reversed(uses)))  # the last use needs least

    every = costs.none.layers
    return bisect_left(range(every), True, key=is_enough) if is_enough(every) else every


def _climb(costs: Costs, start: StatePlacement) -> StatePlacement:
    """Return the local optimum from `start`: no change makes the step shorter, or moves fewer states in equal time."""
    best, step = start, max(1, start.layers // 4)
    while step:
        faster = min(_around(best, step, costs.sizes.has_masters), key=partial(_rank, costs))
        if _rank(costs, faster) < _rank(costs, best):
            best = faster
        else:
            step //= 2
    return best


def _rank(costs: Costs, placement: StatePlacement) -> tuple[float, float]:
    """Return the sort key of placements: the time of a step, then the number of states in host memory.

    Placements that do not fit come last, those first that lack least.
    """
    seconds, use = costs.best_use(placement)
    if use is None:
        return seconds, min(sum(max(1.0, share) for share in costs.excess(placement, each)) for each in costs.uses)
    return seconds, placement.optimizer + placement.gradients + placement.weights


def _around(at: StatePlacement, step: int, has_masters: bool) -> Iterator[StatePlacement]:
    for exchange in _EXCHANGES:
        optimizer, gradients, weights = (
            min(max(0, getattr(at, name) + exchange.get(name, 0) * step), at.layers)
            for name in ("optimizer", "gradients", "weights")
        )
        yield _moving(at, optimizer, gradients, weights)
    if has_masters:
        yield at._replace(weight_copy=not at.weight_copy)
